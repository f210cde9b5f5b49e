//! Starts the ranks of a job on this host.

mod arguments;
mod count;
mod meeting;

use std::process::ExitCode;
use std::time::Duration;

use arguments::{Arguments, Place};
use collectives::Secret;
use collectives_launch::{Job, Logs, Output, Refused, Store};

/// How long the other hosts may take to come, as torchrun has it for its ranks.
const PATIENCE: Duration = Duration::from_secs(1800);

fn main() -> ExitCode {
    match run(&Arguments::read()) {
        Ok(code) => ExitCode::from(code),
        Err(refused) => {
            eprintln!("collrun: {}", refused.message);
            ExitCode::from(refused.code)
        }
    }
}

fn usage(message: String) -> Refused {
    Refused { message, code: 2 }
}

/// Serves the store where it is this host's to serve, and runs the job.
fn run(arguments: &Arguments) -> Result<u8, Refused> {
    let place = arguments.place().map_err(usage)?;
    let local_world_size = arguments.nproc_per_node.ranks().map_err(usage)?;
    let given = Secret::from_env().map_err(|error| usage(error.to_string()))?;
    let patience = arguments.rdzv_conf.unwrap_or(PATIENCE);
    let hosts = meeting::Hosts { count: arguments.nnodes.into(), job: arguments.rdzv_id.as_deref().unwrap_or("none"), patience };
    let met = match given {
        None if arguments.secret => with_new_secret(&place, &hosts)?,
        secret => meeting::meet(&place, secret.as_ref(), &hosts),
    };
    let (node, store) = met.map_err(|error| Refused { message: format!("the ranks' store: {error}"), code: 1 })?;
    let job = job(arguments, local_world_size, node);
    let given = Secret::from_env().map_err(|error| usage(error.to_string()))?;
    let end = collectives_launch::run("collrun", &job, &store, given.as_ref())?;
    if let Some(failure) = &end.failure {
        eprintln!("collrun: first failure: {failure}");
    }
    Ok(end.code)
}

/// What is to be started here.
fn job(arguments: &Arguments, local_world_size: usize, node: usize) -> Job {
    let (program, words) = arguments.program();
    let usual = Job::new(program, words, local_world_size);
    let has_files = !(arguments.redirects.is_empty() && arguments.tee.is_empty());
    let listen = arguments.local_addr.iter().map(|address| ("COLLECTIVES_LISTEN_ADDRESS".into(), address.into()));
    Job {
        variables: listen.collect(),
        nodes: usize::from(arguments.nnodes),
        node,
        run_id: arguments.rdzv_id.clone().filter(|_| !arguments.standalone),
        role: arguments.role.clone(),
        virtual_local_rank: arguments.virtual_local_rank,
        output: if arguments.no_prefix { Output::Inherited } else { Output::Prefixed },
        logs: Logs { redirects: arguments.redirects.clone(), tee: arguments.tee.clone(), shown: arguments.local_ranks_filter.clone() },
        log_folder: arguments.log_dir.clone().or_else(|| has_files.then(|| std::env::temp_dir().join("collrun"))),
        prefix: if arguments.no_prefix { String::new() } else { arguments.log_line_prefix_template.clone() },
        signals: arguments.signals_to_handle.clone(),
        patience: arguments.rdzv_conf.unwrap_or(PATIENCE),
        grace: arguments.grace.unwrap_or(usual.grace),
        grace_after_signal: arguments.grace.unwrap_or(usual.grace_after_signal),
        most_restarts: arguments.max_restarts,
        keep_going: arguments.keep_going,
        ..usual
    }
}

/// A store that lets in the ranks of this host alone.
fn with_new_secret(place: &Place, hosts: &meeting::Hosts<'_>) -> Result<collectives::Result<(usize, Store)>, Refused> {
    let Place::Alone { .. } = place else {
        let message = "--secret: the other hosts could not know it; give COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE on each";
        return Err(usage(message.to_owned()));
    };
    Ok(Secret::random().and_then(|secret| {
        let (node, mut store) = meeting::meet(place, Some(&secret), hosts)?;
        store.secret = Some(secret);
        Ok((node, store))
    }))
}
