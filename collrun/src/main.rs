//! Starts the ranks of a job on this host.

mod arguments;

use std::process::ExitCode;

use arguments::{Arguments, Place};
use clap::Parser;
use collectives::Secret;
use collectives_launch::{Job, Output, Refused, Store};

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(refused) => {
            eprintln!("collrun: {}", refused.message);
            ExitCode::from(refused.code)
        }
    }
}

/// Serves the store where it is this host's to serve, and runs the job.
fn run(arguments: Arguments) -> Result<u8, Refused> {
    let place = arguments.place().map_err(|message| Refused { message, code: 2 })?;
    let node = match &place {
        Place::Alone { .. } => 0,
        Place::Among { node, .. } => usize::from(*node),
    };
    let given = Secret::from_env().map_err(|error| Refused { message: error.to_string(), code: 2 })?;
    let store = match given {
        Some(secret) => store(&place, Some(&secret)),
        None if arguments.secret => with_new_secret(&place)?,
        None => store(&place, None),
    };
    let store = store.map_err(|error| Refused { message: format!("the ranks' store: {error}"), code: 1 })?;
    let mut command = arguments.command.into_iter();
    let job = Job {
        program: command.next().unwrap_or_default(),
        arguments: command.collect(),
        local_world_size: usize::from(arguments.nproc_per_node),
        nodes: usize::from(arguments.nnodes),
        node,
        output: if arguments.no_prefix { Output::Inherited } else { Output::Prefixed },
        grace: arguments.grace,
        verdict: None,
        keep_going: arguments.keep_going,
    };
    collectives_launch::run("collrun", &job, &store)
}

/// A store that lets in the ranks of this host alone.
fn with_new_secret(place: &Place) -> Result<collectives::Result<Store>, Refused> {
    if let Place::Among { .. } = place {
        let message = "--secret: the other hosts could not know it; give COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE on each".to_owned();
        return Err(Refused { message, code: 2 });
    }
    Ok(Secret::random().and_then(|secret| {
        let mut store = store(place, Some(&secret))?;
        store.secret = Some(secret);
        Ok(store)
    }))
}

/// The job's store, served here by host 0.
fn store(place: &Place, secret: Option<&Secret>) -> collectives::Result<Store> {
    match place {
        Place::Alone { address: None, port: None } => Store::local(secret),
        Place::Alone { address, port } => Store::serve(address.as_deref().unwrap_or("127.0.0.1"), port.unwrap_or(0), secret),
        Place::Among { node: 0, address, port } => Store::serve(address, *port, secret),
        Place::Among { address, port, .. } => Ok(Store::elsewhere(address, *port)),
    }
}
