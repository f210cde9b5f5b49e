//! Starts the ranks of a job: on this host, or on several, with a launcher on each.

mod arguments;
mod carrier;
mod control;
mod count;
mod environment;
mod failures;
mod host_list;
mod meeting;
mod mpirun;
mod order;
mod place;
mod remote;
mod rendezvous;

use std::ffi::OsString;
use std::net::ToSocketAddrs as _;
use std::process::ExitCode;

use arguments::Arguments;
use collectives::Secret;
use collectives_launch::{
    Asked, Binding, Elastic, Failure, Job, Logs, Output, Refused, Store, Stream, Width, Writer, hint, say, temporary_folder,
};
use failures::{tell_user, usage};
use place::Place;

fn main() -> ExitCode {
    if collectives_launch::guard() {
        return ExitCode::SUCCESS;
    }
    let arguments = match Arguments::read() {
        Ok(arguments) => arguments,
        Err(reason) => {
            say("collrun", &reason);
            return ExitCode::from(2);
        }
    };
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if arguments.controlled.is_some() {
        report(carrier::STARTED);
    }
    let ended = match arguments.read_order {
        true => Err(order::follow()),
        false => remote::run(&arguments, &words).and_then(|code| code.map_or_else(|| run(&arguments), Ok)),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(refused) => {
            say(&name(&arguments), &refused.message);
            ExitCode::from(refused.code)
        }
    }
}

/// Returns the text before each message: with several hosts, it includes this one.
fn name(arguments: &Arguments) -> String {
    arguments.controlled.as_ref().map_or_else(|| "collrun".to_owned(), |control| format!("collrun on {}", control.name))
}

/// Serves the store if that is this host's task, and runs the job.
fn run(arguments: &Arguments) -> Result<u8, Refused> {
    let place = arguments.place().map_err(usage)?;
    let local_world_size = arguments.local_world_size().map_err(usage)?;
    if let Some(folder) = arguments.wdir.as_ref().filter(|folder| !folder.is_dir()) {
        return Err(usage(format!("--wdir {}: there is no such folder on this host", folder.display())));
    }
    can_be_reached(arguments, &place)?;
    let asked = arguments.bind.map_or(Asked::Nothing, Asked::For);
    let binding = match arguments.numa_binding {
        Some(binding) => binding.here(local_world_size),
        None => Binding::here(asked, Width::Share, local_world_size),
    };
    let binding = binding.map_err(usage)?;
    let given = Secret::from_env().map_err(|error| usage(error.to_string()))?;
    let patience = arguments.conf().join;
    let hosts = meeting::Hosts { count: arguments.nodes().into(), job: arguments.rdzv_id.as_deref().unwrap_or("none"), patience };
    let met = match given {
        None if arguments.secret => with_new_secret(&place, &hosts)?,
        secret => meeting::meet(&place, secret.as_ref(), &hosts),
    };
    let (node, store) = met.map_err(|error| Refused { message: format!("the ranks' store: {}", with_limit(&error)), code: 1 })?;
    let is_elastic = matches!(place, Place::Elastic { .. });
    if arguments.report_bindings {
        // An elastic job numbers its ranks later.
        let (ranks, first) = if is_elastic { (" (local ranks)", 0) } else { ("", node * local_world_size) };
        say(&name(arguments), &format!("bound to{ranks}: {}", binding.told(first)));
    }
    let elastic = is_elastic.then(|| elastic(arguments, node == 0));
    let job = Job { binding, elastic, ..job(arguments, local_world_size, node)? };
    let given = Secret::from_env().map_err(|error| usage(error.to_string()))?;
    let end = collectives_launch::run(&name(arguments), &job, &store, given.as_ref())?;
    if let Some(failure) = &end.failure {
        tell(arguments, failure);
    }
    Ok(end.code)
}

/// Reports which rank failed first: to the launcher that started this one, if there is one, since it collects the
/// failures of all hosts.
fn tell(arguments: &Arguments, failure: &Failure) {
    if arguments.controlled.is_none() {
        return tell_user(failure);
    }
    report(&failure.to_json());
}

/// Reports something to the launcher that started this one.
fn report(what: &[u8]) {
    let line = [&[carrier::REPORT], what, b"\n"].concat();
    // An error means that the launcher is gone.
    let _ = Writer::new(Stream::Error, "", "").write(&line);
}

/// Describes an error, with the limit of this process that caused it, if one did.
fn with_limit(error: &collectives::Error) -> String {
    let hint = if let collectives::Error::Io { error, .. } = error { hint(error) } else { None };
    hint.map_or_else(|| error.to_string(), |hint| format!("{error}: {hint}"))
}

/// Checks that other hosts can reach the store that this host is to serve: many hosts resolve their own name to the
/// loopback interface.
fn can_be_reached(arguments: &Arguments, place: &Place) -> Result<(), Refused> {
    let (Some(_), Place::Among { node: 0, address, port }) = (&arguments.controlled, place) else { return Ok(()) };
    match (&**address, *port).to_socket_addrs().ok().and_then(|mut found| found.next()).filter(|found| found.ip().is_loopback()) {
        Some(found) => Err(usage(format!(
            "the ranks would meet at {address}, but this host resolves {address} to {}, which no other host can reach. Give --master-addr \
             with the address at which the other hosts reach this host",
            found.ip()
        ))),
        None => Ok(()),
    }
}

/// Returns the job to start here.
fn job(arguments: &Arguments, local_world_size: usize, node: usize) -> Result<Job, Refused> {
    let (program, words) = arguments.program();
    let usual = Job::new(program, words, local_world_size);
    let has_files = !(arguments.redirects.is_empty() && arguments.tee.is_empty());
    // The launcher that started this one has passed the variables on.
    let mut variables = if arguments.controlled.is_some() { Vec::new() } else { order::asked(&arguments.env).map_err(usage)? };
    variables.extend(arguments.local_addr.iter().map(|address| ("COLLECTIVES_LISTEN_ADDRESS".into(), address.into())));
    Ok(Job {
        folder: arguments.wdir.clone(),
        variables,
        nodes: usize::from(arguments.nodes()),
        node,
        run_id: arguments.rdzv_id.clone().filter(|_| !arguments.standalone),
        role: arguments.role.clone(),
        virtual_local_rank: arguments.virtual_local_rank,
        output: if arguments.no_prefix { Output::Inherited } else { Output::Prefixed },
        logs: Logs { redirects: arguments.redirects.clone(), tee: arguments.tee.clone(), shown: arguments.local_ranks_filter.clone() },
        log_folder: arguments.log_dir.clone().or_else(|| has_files.then(temporary_folder)),
        prefix: arguments.prefix(),
        signals: arguments.signals_to_handle.clone(),
        patience: arguments.conf().join,
        grace: arguments.grace.unwrap_or(usual.grace),
        grace_after_signal: arguments.grace.unwrap_or(usual.grace_after_signal),
        controlled: arguments.controlled.is_some(),
        most_restarts: if arguments.replace { 0 } else { arguments.max_restarts },
        keep_going: arguments.keep_going || arguments.replace,
        replacements: if arguments.replace { arguments.max_restarts } else { 0 },
        ..usual
    })
}

/// Returns the rules of an elastic job.
fn elastic(arguments: &Arguments, serves: bool) -> Elastic {
    let conf = arguments.conf();
    Elastic {
        least: arguments.nnodes.least.into(),
        most: arguments.nnodes.most.into(),
        last_call: conf.last_call,
        lost_after: conf.lost_after(),
        serves,
    }
}

/// Meets with a new secret, at a store that admits only the ranks of this host.
fn with_new_secret(place: &Place, hosts: &meeting::Hosts<'_>) -> Result<collectives::Result<(usize, Store)>, Refused> {
    let Place::Alone { .. } = place else {
        let message = "--secret: the other hosts would not have the secret; set COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE on each host";
        return Err(usage(message.to_owned()));
    };
    Ok(Secret::random().and_then(Secret::encrypting_if_asked).and_then(|secret| {
        let (node, mut store) = meeting::meet(place, Some(&secret), hosts)?;
        store.secret = Some(secret);
        Ok((node, store))
    }))
}
