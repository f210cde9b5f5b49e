//! The error of a collective can be found in an error of candle, and `run_local` returns the error that explains most.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{Context, DType, Device, Error, Result, Tensor};
use collectives::ReduceOp;
use collectives_candle::{all_reduce, all_reduce_in_place, cause, run_local};

fn ones() -> Result<Tensor> {
    Tensor::ones(4, DType::F32, &Device::Cpu)
}

/// The error of rank 0 if rank 1 leaves.
fn lost_peer() -> Error {
    let errors = run_local(2, |comm| Ok((comm.rank() == 0).then(|| all_reduce(comm, &ones()?, ReduceOp::Sum)).and_then(Result::err)));
    errors.unwrap().swap_remove(0).unwrap()
}

#[test]
fn the_cause_is_found_under_everything_that_candle_adds() {
    let backtrace =
        |error| Error::WithBacktrace { inner: Box::new(error), backtrace: Box::new(std::backtrace::Backtrace::force_capture()) };
    let added = [
        lost_peer(),
        lost_peer().context("layer 3").context("stage 1"),
        lost_peer().with_path("model.gguf"),
        backtrace(lost_peer()),
        backtrace(lost_peer().with_path("model.gguf").context("layer 3")),
        Err::<(), _>(lost_peer()).context("as anyhow does").unwrap_err(),
        Err::<(), _>(lost_peer().context("within")).context("around").unwrap_err().context("more"),
    ];
    for error in added {
        let found = cause(&error).unwrap();
        assert!(found.is_peer_lost() && found.peer().unwrap().rank == 1, "{error}");
        assert!(error.to_string().contains("all_reduce"), "{error}");
    }
}

#[test]
fn the_cause_is_found_in_errors_that_the_program_itself_wraps() {
    let own = || collectives::Error::argument("all_reduce", "a reason");
    let found = Err::<(), _>(own()).context("layer 3").unwrap_err();
    assert!(matches!(cause(&found), Some(collectives::Error::InvalidArgument { .. })));
    assert!(cause(&Error::from(std::io::Error::other(own()))).is_some());
    assert!(cause(&Error::from(std::io::Error::other(Error::from(std::io::Error::other(own()))))).is_some());
}

#[test]
fn other_errors_have_no_such_cause() {
    let shape = ones().unwrap().reshape((3, 3)).unwrap_err();
    let io = Error::from(std::io::Error::from(std::io::ErrorKind::NotFound));
    for error in [shape, io, Error::Msg("text".to_owned()).context("more"), Error::wrap("text").bt()] {
        assert!(cause(&error).is_none(), "{error}");
    }
}

#[test]
fn calls_in_place_and_backward_passes_keep_the_cause() {
    let errors = run_local(2, |comm| {
        let x = candle_core::Var::ones(2 + comm.rank(), DType::F32, &Device::Cpu)?;
        Ok(all_reduce_in_place(comm, &x, ReduceOp::Sum).unwrap_err())
    });
    assert!(errors.unwrap().iter().all(|error| cause(error).unwrap().is_mismatch()));
    let errors = run_local(2, |comm| {
        let x = candle_core::Var::ones(2, DType::F32, &Device::Cpu)?;
        let loss = all_reduce(comm, &x, ReduceOp::Sum)?.sum_all()?;
        Ok((comm.rank() == 0).then(|| loss.backward().unwrap_err()))
    });
    assert!(cause(errors.unwrap()[0].as_ref().unwrap()).unwrap().is_peer_lost());
}

#[test]
fn the_error_of_the_rank_that_failed_for_its_own_reason_is_returned() {
    for bad in 0..3 {
        let error = run_local(3, |comm| {
            if comm.rank() == bad {
                return ones()?.reshape((5, 5)).context(format!("rank {bad}"));
            }
            all_reduce(comm, &ones()?, ReduceOp::Sum)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("rank {bad}")) && error.contains("[5, 5]"), "{error}");
    }
    let error = run_local(2, |comm| {
        if comm.rank() == 1 {
            comm.abort();
            candle_core::bail!("rank 1 has no file");
        }
        all_reduce(comm, &ones()?, ReduceOp::Sum)
    });
    assert!(error.unwrap_err().to_string().contains("rank 1 has no file"));
}

#[test]
fn a_rank_that_leaves_or_panics_is_named() {
    let error = run_local(2, |comm| if comm.rank() == 1 { ones() } else { all_reduce(comm, &ones()?, ReduceOp::Sum) }).unwrap_err();
    assert!(cause(&error).unwrap().is_peer_lost(), "{error}");
    let error = run_local(2, |comm| {
        assert!(comm.rank() == 0, "rank 1 fails on purpose");
        all_reduce(comm, &ones()?, ReduceOp::Sum)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("panicked") && error.contains("rank 1"), "{error}");
}

#[test]
fn results_come_in_rank_order_and_no_ranks_are_refused() {
    assert_eq!(run_local(3, |comm| Ok(comm.rank())).unwrap(), [0, 1, 2]);
    assert_eq!(run_local(1, |comm| all_reduce(comm, &ones()?, ReduceOp::Sum)?.to_vec1::<f32>()).unwrap(), [[1.0; 4]]);
    assert!(cause(&run_local(0, |_| Ok(())).unwrap_err()).is_some());
}
