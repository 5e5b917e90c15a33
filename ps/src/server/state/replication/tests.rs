use super::*;
use crate::proto::ShardRole;

const PROCESS: Process = Process { instance: 1, incarnation: 0 };

fn process(instance: u64, incarnation: u32) -> Process {
    Process { instance, incarnation }
}

/// A process of server 1, which follows shard 0.
fn follower(instance: u64, incarnation: u32) -> proto::ShardHolder {
    proto::ShardHolder { instance, incarnation, role: ShardRole::Backup.into(), ..proto::ShardHolder::default() }
}

/// Server 0 of two, which has just become the primary of its own shard; its blocks do not know that yet.
fn about_to_lead() -> Replication {
    let replication = Replication {
        process: PROCESS,
        index: 0,
        servers: vec!["a:1".into(), "b:1".into()],
        network: Network::default(),
        has_checkpoints: false,
        recovery: Arc::new(Recovery::new(2)),
        shards: Mutex::new([(0, Shard::new(true)), (1, Shard::new(false))].into()),
        changed: Notify::new(),
        asked: Notify::new(),
    };
    let transition = replication.learn(0, Evidence::Is(ShardRole::Starting));
    assert_eq!(transition, Transition::To(Role::Primary { alone: false }));
    replication
}

/// Returns that server a moment later.
fn leads() -> Replication {
    let replication = about_to_lead();
    replication.settle(0);
    replication
}

#[tokio::test]
async fn no_caller_is_served_before_the_blocks_have_their_role() {
    let replication = about_to_lead();
    assert!(replication.leads(0).is_err() && replication.serve(&follower(2, 0)).is_err());
    replication.settle(0);
    assert!(replication.leads(0).is_ok() && replication.serve(&follower(2, 0)).is_ok());
}

#[tokio::test]
async fn evidence_from_before_a_backup_followed_changes_nothing() {
    let replication = leads();
    let stream = replication.serve(&follower(2, 0)).expect("it leads");
    assert_eq!(replication.learn(0, Evidence::Refused), Transition::Stay);
    assert_eq!(replication.role(0), Role::Primary { alone: false });
    replication.close_stream(0, &stream);
    assert_eq!(replication.learn(0, Evidence::Refused), Transition::To(Role::Primary { alone: true }));
    assert!(replication.serve(&follower(3, 0)).is_err(), "a backup would be dropped by the blocks that go on alone");
}

#[tokio::test]
async fn a_primary_goes_on_without_a_backup_that_had_everything_only_when_it_is_elected() {
    let replication = leads();
    let stream = replication.serve(&follower(2, 0)).expect("it leads");
    replication.change(0, |here| drop(here.election.complete([(0, 0), (1, 0)].into())));
    replication.close_stream(0, &stream);
    assert_eq!(replication.learn(0, Evidence::Refused), Transition::Stand);
    let refusal = replication.leads(0).expect_err("it is a candidate");
    let candidate = proto::ShardHolder::decode(refusal.details()).expect("it describes itself");
    assert!(candidate.candidate && candidate.instance == PROCESS.instance);
    let vote_for = |trainer, instance| {
        let vote =
            proto::VoteRequest { term: candidate.term, granted: true, instance, ..proto::VoteRequest::default() };
        replication.vote(&vote, (trainer, 0)).expect("it holds the shard");
    };
    let vote = |trainer| vote_for(trainer, PROCESS.instance);
    let elected = replication.elected(0, |_| true);
    tokio::pin!(elected);
    vote(0);
    vote_for(1, PROCESS.instance + 1);
    assert!(futures::FutureExt::now_or_never(&mut elected).is_none(), "one vote of two, and one for another process");
    vote(1);
    assert_eq!(elected.await, Role::Primary { alone: true });
    replication.settle(0);
    assert!(replication.decided(0, candidate.term).await && replication.leads(0).is_ok());
}

#[tokio::test]
async fn a_primary_is_sure_that_it_leads_only_when_its_backup_follows() {
    let replication = leads();
    let _stream = replication.serve(&follower(2, 0)).expect("it leads");
    let sure = replication.confirm_leads(0);
    tokio::pin!(sure);
    assert!(futures::FutureExt::now_or_never(&mut sure).is_none());
    let asked = replication.confirmation(0);
    replication.confirmed(0, asked - 1);
    assert!(futures::FutureExt::now_or_never(&mut sure).is_none(), "an answer to an earlier question");
    replication.confirmed(0, asked);
    assert_eq!(sure.await.expect("it leads"), 0);
    let sure = replication.confirm_leads(0);
    replication.change(0, |here| here.election.stand());
    assert!(sure.await.is_err(), "the trainers elect who leads");
}

#[tokio::test(start_paused = true)]
async fn a_primary_whose_backup_is_silent_is_not_sure_that_it_leads() {
    let replication = leads();
    let _stream = replication.serve(&follower(2, 0)).expect("it leads");
    assert!(replication.confirm_leads(0).await.is_err());
    replication.change(0, |here| here.role = Role::Primary { alone: true });
    assert!(replication.confirm_leads(0).await.is_ok(), "no other process may lead");
}

#[tokio::test]
async fn a_backup_that_comes_back_ends_a_candidacy() {
    let replication = leads();
    let stream = replication.serve(&follower(2, 0)).expect("it leads");
    replication.change(0, |here| drop(here.election.complete([(0, 0)].into())));
    replication.close_stream(0, &stream);
    assert_eq!(replication.learn(0, Evidence::Silent), Transition::Stand);
    let term = replication.holder(0).expect("it holds the shard").term;
    let _again = replication.serve(&follower(2, 0)).expect("it still is the primary");
    assert!(replication.leads(0).is_ok() && !replication.decided(0, term).await);
}

#[tokio::test]
async fn a_primary_that_others_went_on_without_copies_everything() {
    let replication = leads();
    let later = proto::ShardHolder { terms: vec![2], role: ShardRole::Primary.into(), ..follower(2, 0) };
    let evidence = replication.meet_holder(&later);
    assert_eq!(evidence, Evidence::LeadsLater);
    assert_eq!(replication.learn(0, evidence), Transition::To(Role::Backup { complete: false }));
    assert!(replication.has_diverged(0));
    replication.complete(0, proto::Complete { terms: vec![2], voters: None });
    assert!(!replication.has_diverged(0) && replication.meet_holder(&later) == Evidence::Is(ShardRole::Primary));
}

#[tokio::test]
async fn a_new_stream_has_copied_nothing() {
    let replication = leads();
    let _first = replication.serve(&follower(2, 0)).expect("it leads");
    replication.change(0, |shard| shard.whole = true);
    let _second = replication.serve(&follower(3, 0)).expect("it leads");
    assert!(replication.warnings(true).iter().any(|text| text.contains("server 0 are held once")));
}

#[tokio::test]
async fn a_process_that_was_replaced_closes_no_stream_of_its_successor() {
    let replication = leads();
    let old = replication.serve(&follower(2, 0)).expect("it leads");
    assert_eq!(replication.meet(0, process(3, 1)), None, "a successor");
    assert!(old.is_cancelled(), "the process before it may still be connected");
    let new = replication.serve(&follower(3, 1)).expect("it leads");
    assert_eq!(replication.meet(0, process(2, 0)), Some(1), "it still runs");
    assert!(replication.serve(&follower(2, 0)).is_err());
    assert!(!new.is_cancelled());
    assert_eq!(replication.meet(0, process(4, 1)), None, "started again without a new number");
    assert!(new.is_cancelled());
}

#[tokio::test]
async fn copies_of_leaders_that_went_to_a_checkpoint_before_count_no_more() {
    let replication = about_to_lead();
    let complete = |shard: &mut Shard| (shard.role, shard.leaders_epoch) = (Role::Backup { complete: true }, 5);
    replication.change(1, complete);
    assert!(!replication.holds_copies_alone(5), "it leads shard 0");
    replication.discard_copies(6);
    assert_eq!((replication.role(1), replication.has_diverged(1)), (Role::Backup { complete: true }, false));
    replication.discard_copies(5);
    assert_eq!(replication.role(0), Role::Primary { alone: false });
    assert_eq!((replication.role(1), replication.has_diverged(1)), (Role::Backup { complete: false }, true));
    [0, 1].into_iter().for_each(|shard| replication.change(shard, complete));
    assert_eq!([4, 5, 6].map(|epoch| replication.holds_copies_alone(epoch)), [false, true, false]);
}
