//! Binds ranks to processors, and collects what all of them are bound to.
//!
//! Each rank binds itself once it has a communicator, so processes, threads and ranks of any launcher are treated alike.

use collectives::Communicator;

use super::words::{name, share, text};
use crate::facts::Bound;
use crate::failure::Failure;
use crate::launch::{Asked, Binding, Width, processors_here};

/// Binds the calling thread as the command line asks, and gathers what all ranks are bound to. `launcher` is the
/// variable of a launcher that has started the ranks. Every rank calls it.
pub(crate) fn bind(world: &Communicator, asked: Asked, launcher: Option<&str>) -> Result<Bound, Failure> {
    let binding = applied(world, asked, launcher);
    let failed = share(world, &[u64::from(binding.is_err())])?;
    let binding = binding?;
    if let Some(other) = failed.iter().position(|failed| *failed == 1) {
        return Err(Failure::usage(format!("rank {other} cannot be bound, and has printed the reason")));
    }
    let all = share(world, &name(&processors_here()))?;
    let processors = all.chunks_exact(name("").len()).map(text).collect();
    Ok(Bound { to: binding.to.to_string(), why_none: binding.why_none, processors })
}

/// Returns this host's binding, and binds this rank.
fn applied(world: &Communicator, asked: Asked, launcher: Option<&str>) -> Result<Binding, Failure> {
    let binding = match unless_asked(world, asked, launcher) {
        Some(why) => Binding::none(Some(why)),
        None => Binding::here(asked, Width::One, world.local_world_size()).map_err(Failure::usage)?,
    };
    match binding.apply(world.local_rank()) {
        Err(error) if binding.is_asked => Err(Failure::io("binding this rank", &error)),
        Err(error) => Ok(Binding::none(Some(format!("the system refuses it: {error}")))),
        Ok(()) => Ok(binding),
    }
}

/// Returns why ranks are not bound, if the command line does not ask for a binding.
fn unless_asked(world: &Communicator, asked: Asked, launcher: Option<&str>) -> Option<String> {
    if asked != Asked::Nothing {
        return None;
    }
    if let Some(variable) = launcher {
        return Some(format!("left to the launcher, which has set {variable}"));
    }
    is_on_device(world).then(|| "for calls on devices, NCCL has its own threads".to_owned())
}

#[cfg(feature = "cuda")]
fn is_on_device(world: &Communicator) -> bool {
    world.device().is_some()
}

#[cfg(not(feature = "cuda"))]
fn is_on_device(_world: &Communicator) -> bool {
    false
}
