//! Checkpoints that take long, and restores that were asked for too late.

use std::time::Duration;

use crate::job;
use crate::plan::Plan;

/// In Sync a checkpoint is of a step to come: that step is waited for, however long the exchanges before it take.
#[test]
fn a_job_of_slow_exchanges_keeps_checkpoints_while_it_trains() {
    let (checkpoint, compute) = (Some(Duration::from_secs(1)), 200_000);
    for seed in 0..4 {
        let plan = Plan { checkpoint, compute, trainers: 4, steps: 5, keep: 10, ..Plan::fair(seed) };
        let outcome = job::run(&plan, false);
        assert_eq!(outcome.verdict, Ok(()), "seed {seed}");
        let between = outcome.checkpoints.iter().filter(|step| (1..plan.steps).contains(*step)).count();
        assert!(between > 0, "seed {seed}: {:?}", outcome.checkpoints);
    }
}

/// Seeds that went wrong once, with what happened.
#[test]
fn faults_that_seeds_found_stay_mended() {
    let rows = [
        (
            743_080,
            "server 0 stopped while trainers were at work, and parts of the last checkpoint were several steps apart",
        ),
        (721_970, "the rows of a trainer's last step were lost with a server, and the trainer counted as finished"),
        (720_565, "a server that had just started restored an epoch for a server 0 that had been replaced"),
        (806_947, "rows that were cleared counted as equal to those after the first push"),
        (803_273, "a trainer came back while an elastic job wrote its model, which then was not written"),
        (821_467, "trainers of tables waited for ever for a checkpoint, as a server was lost for good"),
        (1_001_054, "a full disk took a part of the points of metrics, and other points were written into their place"),
        (
            1_008_533,
            "a server led a shard that it had none of, its follower took over from it, and no trainer could join to elect \
             the leader of the other shard",
        ),
        (
            1_014_572,
            "a server waited for an election before it asked for a checkpoint, and its voters for the checkpoint",
        ),
        (
            1_000_479,
            "a trainer did not hear that server 0 had heard of its end, and asked for ever after that one had ended",
        ),
        (1_001_051, "a server that had heard of the trainers, and not of their layers, refused their tables"),
        (2_008_467, "trainers of tables were cut off after their last step, and waited for servers that had ended"),
        (2_008_522, "a trainer did not hear the answer to its last step, and waited for servers that had ended"),
        (
            2_011_034,
            "a trainer was cut off after its last step, and a server waited for it when the other one had ended",
        ),
        (3_003_309, "the last message of a trainer that was asked to stop got lost, and was not repeated"),
        (
            5_002_506,
            "a server that was cut off led the successor of one that had been elected meanwhile, and a checkpoint had its \
             old blocks",
        ),
        (5_005_438, "a trainer's process that had lived on joined the last server, which then waited for it for ever"),
        (
            5_011_535,
            "a trainer waited at a server for another trainer, which had given up because the other server was gone for good",
        ),
        (
            7_020_488,
            "a server could not read the checkpoint at first, and went to it when others had gone on from there and it had \
             copied their blocks",
        ),
        (7_030_391, "a trainer waited for a checkpoint that could not be written, because a server was gone for good"),
        (
            8_025_208,
            "server 0 was cut off on the way to a checkpoint, where some trainers had followed it, and its successor went on \
             from before that",
        ),
        (
            9_018_931,
            "trainers of tables had voted for a server that was replaced, and did not hear of its successor, which they could \
             not join before the election",
        ),
        (
            9_054_642,
            "server 0 had yet to copy its blocks from the server that led them when the trainers had given their last step, and \
             took the checkpoint before for the last one",
        ),
        (9_066_783, "a server 0 that took over did not know the steps of a trainer that had left before"),
        (
            9_204_613,
            "the only durable checkpoint was removed, because the lock could not be read after its manifest was there",
        ),
        (
            10_012_135,
            "a server that was cut off had not heard of the leader elected since, and gave its old part to the last checkpoint",
        ),
        (
            11_033_360,
            "a trainer read rows beside its parameters after its last step, from a server 0 that had counted it as gone and ended",
        ),
        (
            12_011_846,
            "a server 0 that took over before it had copied its blocks did not know the steps of a trainer that had left",
        ),
        (
            12_031_152,
            "a trainer joined a server before it was elected and opened its stream after that, and voted for one that lacked what \
             it was given",
        ),
        (1_013_842, "a server that had none of a shard counted as its later leader"),
        (
            13_039_032,
            "trainers refused every holder of a shard after all had gone to a checkpoint, for what they had had before",
        ),
        (13_050_864, "points of metrics were called durable in a folder whose name was not, and went with the machine"),
        (15_037_310, "a server that had copied tables took the layers for those that trainers train themselves"),
        (
            17_010_212,
            "the servers went to a checkpoint with a trainer's last step before it had said so, and it left without saying so",
        ),
        (
            17_022_413,
            "a trainer that had finished was asked to end while it could not reach one server, and ended with an error",
        ),
    ];
    for (seed, what) in rows {
        assert_eq!(job::run(&Plan::new(seed), false).verdict, Ok(()), "seed {seed}: {what}");
    }
}
