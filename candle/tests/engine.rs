//! The example of an engine gives the same answers on any number of ranks and stages.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::Tensor;
use collectives_candle::{cause, run_local};

#[allow(dead_code, reason = "the test replaces `main`")]
#[path = "../examples/engine.rs"]
mod engine;

fn values(answers: &[(usize, Tensor)]) -> Vec<(usize, Vec<Vec<f32>>)> {
    answers.iter().map(|(request, answer)| (*request, answer.to_vec2().unwrap())).collect()
}

#[test]
fn every_number_of_ranks_stages_and_workers_gives_the_answers_of_one_process() {
    let requests = engine::requests(13).unwrap();
    let serve = |ranks: usize, stages: usize, workers: usize| {
        run_local(ranks, |comm| engine::Engine::new(comm, stages, workers)?.serve(&requests)).unwrap()
    };
    let expected = values(&serve(1, 1, 1)[0]);
    assert_eq!(expected.iter().map(|(request, _)| *request).collect::<Vec<_>>(), (0..13).collect::<Vec<_>>());
    assert!(expected.iter().flat_map(|(_, rows)| rows.concat()).any(|value| value > 1.0));
    for (ranks, stages) in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)] {
        for workers in [1, 3] {
            for (rank, answers) in serve(ranks, stages, workers).iter().enumerate() {
                let is_last = rank >= ranks / stages * (stages - 1);
                let expected = if is_last { expected.clone() } else { Vec::new() };
                assert_eq!(values(answers), expected, "rank {rank} of {ranks}, {stages} stages, {workers} workers");
            }
        }
    }
}

#[test]
fn ranks_that_cannot_be_divided_and_a_lost_rank_are_told_apart() {
    let requests = engine::requests(4).unwrap();
    let error = run_local(3, |comm| engine::Engine::new(comm, 2, 1)?.serve(&requests)).unwrap_err();
    assert!(error.to_string().contains("3 ranks and 2 blocks cannot be divided into 2 stages") && cause(&error).is_none(), "{error}");
    assert!(run_local(2, |comm| engine::Engine::new(comm, 1, 0).map(drop)).unwrap_err().to_string().contains("at least one worker"));
    let errors = run_local(2, |comm| {
        let engine = engine::Engine::new(comm, 2, 2)?;
        Ok((comm.rank() == 1).then(|| engine.serve(&requests).unwrap_err()))
    });
    let error = errors.unwrap().pop().unwrap().unwrap();
    assert!(cause(&error).unwrap().is_peer_lost(), "{error}");
}
