//! Slurm's variables, and its way to write lists of hosts.

use super::variables::{LOOPBACK, Launch, SLURM, Variables, port_of, shortened};
use crate::Result;
use crate::rendezvous::url::DEFAULT_PORT;

/// What `srun` has told this process.
pub(super) fn launch(variables: &Variables<'_>) -> Result<Launch> {
    let world_size = variables.first_number(SLURM.1)?;
    let in_step = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"].iter().any(|name| variables.text(name).is_some());
    if !in_step && world_size > 1 {
        let reason =
            format!("not set, although SLURM_PROCID is: this process is the batch script's, not one of {world_size}; start it with srun");
        return Err(variables.wrong("SLURM_STEP_ID", &reason));
    }
    let local = (variables.number("SLURM_LOCALID")?, local_world_size(variables)?);
    variables.launch("Slurm", SLURM, local, |local| address(variables, local), |_| Ok(port(variables)))
}

/// The first host of the step; loopback where it is the only one.
fn address(variables: &Variables<'_>, local: bool) -> Result<Option<String>> {
    if local {
        return Ok(Some(LOOPBACK.to_owned()));
    }
    for name in ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"] {
        if let Some(list) = variables.text(name) {
            let wrong = |reason: String| variables.wrong(name, &format!("{:?}: {reason}", shortened(&list)));
            let (host, only) = first_host(&list).map_err(wrong)?;
            return Ok(Some(if only { LOOPBACK.to_owned() } else { host }));
        }
    }
    Ok(None)
}

/// A port made from the job and the step, so that two steps on one host do not meet.
fn port(variables: &Variables<'_>) -> u16 {
    let text = |names: [&str; 2]| names.iter().find_map(|name| variables.text(name));
    let job = text(["SLURM_JOB_ID", "SLURM_JOBID"]);
    let step = text(["SLURM_STEP_ID", "SLURM_STEPID"]).unwrap_or_default();
    job.map_or(DEFAULT_PORT, |job| port_of(&format!("{job}.{step}")))
}

/// How many tasks this host has, where Slurm says it: `2(x3),1` are three hosts with two and one with one.
fn local_world_size(variables: &Variables<'_>) -> Result<Option<usize>> {
    let (Some(list), Some(node)) = (variables.text("SLURM_STEP_TASKS_PER_NODE"), variables.number("SLURM_NODEID")?) else {
        return Ok(None);
    };
    let mut before = node;
    for group in list.split(',') {
        let (tasks, hosts) = group.split_once("(x").map_or((group, Some("1")), |(tasks, hosts)| (tasks, hosts.strip_suffix(')')));
        let parsed = tasks.parse::<usize>().ok().zip(hosts.and_then(|hosts| hosts.parse::<usize>().ok()));
        let Some((tasks, hosts)) = parsed else {
            return Err(
                variables.wrong("SLURM_STEP_TASKS_PER_NODE", &format!("{:?} is no list of counts such as \"2(x3),1\"", shortened(&list)))
            );
        };
        if before < hosts {
            return Ok(Some(tasks));
        }
        before -= hosts;
    }
    Ok(None)
}

/// The first host of a list such as `node[01-03,7],login`, and whether it is the only one. Only the first is written out: a short
/// list can name more hosts than there is memory for.
fn first_host(list: &str) -> std::result::Result<(String, bool), String> {
    let mut host = String::new();
    let mut only = true;
    let mut rest = list;
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        let (literal, behind) = rest.split_at(end);
        if literal.contains(char::is_whitespace) {
            return Err(format!("{literal:?} is no part of a host name"));
        }
        host.push_str(literal);
        match behind.as_bytes().first() {
            None => break,
            Some(b',') => {
                only = false;
                break;
            }
            Some(b']') => return Err("a bracket is closed that was not opened".to_owned()),
            Some(_) => {
                let (ranges, after) = behind[1..].split_once(']').ok_or("a bracket is not closed")?;
                let first = ranges.split(['-', ',']).next().unwrap_or_default();
                if first.is_empty() || !ranges.bytes().all(|byte| byte.is_ascii_digit() || b"-,".contains(&byte)) {
                    return Err(format!("{ranges:?} in brackets is no list of numbers"));
                }
                only &= first.len() == ranges.len();
                host.push_str(first);
                rest = after;
            }
        }
    }
    if host.is_empty() { Err("the first host has no name".to_owned()) } else { Ok((host, only)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_is_written_out() {
        let cases = [
            ("node1", "node1", true),
            ("node[01-03,7]", "node01", false),
            ("node[007]", "node007", true),
            ("gpu-a,gpu-b", "gpu-a", false),
            ("rack[2-3]n[10,12]-ib.local,x", "rack2n10-ib.local", false),
            ("n[1]m[2]", "n1m2", true),
            ("tux[0-99999999999999999999]", "tux0", false),
            ("[5-6]", "5", false),
        ];
        for (list, host, only) in cases {
            assert_eq!(first_host(list), Ok((host.to_owned(), only)), "{list}");
        }
    }

    #[test]
    fn a_malformed_list_is_refused() {
        for list in ["", ",", "node[", "node[1-3", "node]", "node[]", "node[-3]", "node[a-b]", "node[1-3]]", "no de", "[[1]]"] {
            assert!(first_host(list).is_err(), "{list:?} gave {:?}", first_host(list));
        }
    }
}
