use super::*;

fn voters(trainers: &[Voter]) -> BTreeSet<Voter> {
    trainers.iter().copied().collect()
}

/// A holder that may be elected by `trainers`, and has just become a candidate.
fn candidate(home: bool, trainers: &[Voter]) -> Election {
    let mut election = Election::new(home);
    election.complete(voters(trainers));
    election.stand();
    election
}

#[test]
fn more_than_half_of_the_voters_elect() {
    let all = [(0, 0), (1, 0), (2, 1), (3, 0)];
    let rows = [
        ("no vote", 4, &[][..], false),
        ("half", 4, &[(0, 0), (1, 0)], false),
        ("more than half", 4, &[(0, 0), (1, 0), (3, 0)], true),
        ("half of three, rounded up", 3, &[(0, 0), (2, 1)], true),
        ("the only one", 1, &[(0, 0)], true),
        ("a process before the one that is a voter", 3, &[(0, 0), (2, 0)], false),
        ("one that is no voter", 2, &[(0, 0), (3, 0)], false),
        ("the same one twice", 2, &[(0, 0), (0, 0)], false),
        ("without voters", 0, &[(0, 0)], false),
    ];
    for (label, count, votes, want) in rows {
        let mut election = candidate(true, &all[..count]);
        let term = election.term;
        votes.iter().for_each(|voter| election.vote(*voter, term, true, false));
        assert_eq!(election.is_elected(false, |_| true), want, "{label}");
    }
}

#[test]
fn voters_that_are_gone_count_once_the_other_holder_was_replaced() {
    let gone = |voter: Voter| voter != (2, 0);
    let mut election = candidate(false, &[(0, 0), (1, 0), (2, 0)]);
    assert!(!election.is_elected(false, gone) && election.is_elected(true, gone));
    election.voters.trainers = voters(&[(2, 0)]);
    assert!(!election.is_elected(true, gone), "the only one is there and has not voted");
    election.voters.trainers.clear();
    assert!(election.is_elected(true, gone), "no trainer trains yet");
}

#[test]
fn votes_of_another_term_do_not_count() {
    let mut election = candidate(true, &[(0, 0)]);
    let before = election.term;
    election.withdraw();
    election.vote((0, 0), before, true, false);
    election.stand();
    election.vote((0, 0), before, true, true);
    assert!(election.term > before && !election.is_elected(false, |_| false) && !election.is_outdated());
    assert_eq!((election.outcome(before), election.outcome(election.term)), (Some(false), None));
    election.vote((0, 0), election.term, true, false);
    assert!(election.is_elected(false, |_| false));
    election.win();
    assert_eq!(election.outcome(election.term), Some(true));
    assert!(!election.is_candidate() && !election.has_rival());
}

#[test]
fn no_two_candidacies_have_one_term() {
    let (mut home, mut other) = (Election::new(true), Election::new(false));
    for _ in 0..3 {
        home.stand();
        other.stand();
        assert!(home.term % 2 == 1 && other.term % 2 == 0);
    }
    home.win();
    let complete = home.complete(voters(&[(0, 0)]));
    other.withdraw();
    other.completed(complete);
    let before = other.term;
    other.stand();
    assert!(other.term > before.max(home.newest_term()), "a candidacy is later than all that it knows");
}

#[test]
fn voters_change_one_at_a_time_and_a_new_process_comes_in_first() {
    let wanted = voters(&[(0, 1), (2, 0)]);
    let mut now = Voters { version: 3, trainers: voters(&[(0, 0), (1, 0)]) };
    let mut steps = Vec::new();
    while let Some(next) = now.toward(&wanted) {
        assert_eq!(next.version, now.version + 1);
        assert_eq!(next.trainers.symmetric_difference(&now.trainers).count(), 1, "{next:?}");
        steps.push(next.trainers.len());
        now = next;
    }
    assert_eq!((now.trainers, steps), (wanted, vec![3, 4, 3, 2]));
    let last = Voters { version: 1, trainers: voters(&[(0, 0)]) };
    assert_eq!(last.toward(&BTreeSet::new()), None, "the last one stays");
}

#[test]
fn a_change_of_voters_waits_until_the_one_before_is_acknowledged() {
    let mut primary = Election::new(true);
    assert!(primary.propose(&voters(&[(0, 0)])).is_none(), "no other process may be elected yet");
    primary.complete(voters(&[(0, 0)]));
    let wanted = voters(&[(0, 0), (1, 0), (2, 0)]);
    let first = primary.propose(&wanted).expect("a trainer has come");
    assert!(primary.propose(&wanted).is_none(), "it has not been acknowledged");
    assert_eq!(primary.voters.trainers.len(), 1, "the primary goes by those before");
    // The backup was lost meanwhile; the next one gets the change that the first may have taken.
    assert_eq!(primary.complete(wanted.clone()).voters, Some(first.clone()));
    primary.acknowledged(first.version - 1);
    assert!(primary.propose(&wanted).is_none());
    primary.acknowledged(first.version);
    assert_eq!(primary.voters.trainers.len(), 2);
    assert!(primary.propose(&wanted).is_some());
}

#[test]
fn a_holder_that_leads_elsewhere_has_not_withdrawn() {
    let mut here = candidate(false, &[(0, 0)]);
    let mut there = candidate(true, &[(0, 0)]);
    let said = |there: &Election| proto::ShardHolder { instance: 7, ..there.describe(0, proto::ShardRole::Primary) };
    here.hear(&said(&there));
    assert_eq!(here.withdrawn, (0, 0), "it is a candidate");
    there.withdraw();
    here.hear(&said(&there));
    assert_eq!(here.withdrawn, (7, there.term));
    there.stand();
    there.win();
    let elected = said(&there);
    here.hear(&elected);
    assert!(here.withdrawn.1 < there.term && here.terms_beyond(&elected), "it was elected");
    here.completed(there.complete(BTreeSet::new()));
    assert!(!here.terms_beyond(&elected));
}

#[test]
fn leaders_of_before_both_holders_were_lost_count_no_more() {
    let term = |replacements, elections| election_term::first(replacements) + elections;
    // How often the servers were replaced before the copy was filled, whether its leader was elected since, and a term that a
    // trainer names.
    for (replacements, elected, heard, is_outdated) in [
        (0, false, 0, false),
        (0, false, 3, true),
        (2, false, 3, false),
        (2, false, term(1, 7), false),
        (2, false, term(2, 0), false),
        (2, false, term(2, 1), true),
        (2, true, term(2, 1), false),
        (2, true, term(2, 2), true),
        (2, true, term(3, 0), true),
    ] {
        let mut election = Election::new(true);
        election.begin(replacements);
        if elected {
            election.stand();
            election.win();
            assert_eq!(election.newest_term(), term(2, 1), "the first of a server at home");
        }
        election.hear_of_leader(heard);
        assert_eq!(election.is_outdated(), is_outdated, "{replacements} {elected} {heard:#x}");
    }
}
