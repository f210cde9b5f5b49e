//! The findings as text.

use super::file::{Backend, State};
use super::finding::{Finding, list};
use super::group::Group;

impl Finding {
    /// Describes the finding; `group` names ranks.
    pub(crate) fn in_words(&self, group: &Group) -> String {
        match self {
            Finding::Died { rank, witnesses, call } => {
                let said = call.as_ref().map(|call| format!(" ({call})")).unwrap_or_default();
                format!("{} is gone: it left no record, and {} lost it{said}", group.name(*rank), list(witnesses))
            }
            Finding::NoRecord { ranks, waiters } => {
                let waiting = if waiters.is_empty() { String::new() } else { format!("; {} waited for it", list(waiters)) };
                let why = "the rank was stuck outside of this communicator's calls, it was killed, or its file is not in this folder";
                format!("no record of {}{waiting}. Possible reasons: {why}", group.names(ranks))
            }
            Finding::Silent { ranks, reason, waiters } => {
                let verb = if waiters.len() == 1 { "waits" } else { "wait" };
                let them = if ranks.len() == 1 { "it" } else { "them" };
                let waiting = if waiters.is_empty() { String::new() } else { format!("; {} {verb} for {them}", list(waiters)) };
                format!("{}: {reason}{waiting}", group.names(ranks))
            }
            Finding::Diverged { backend, number, versions } => {
                let said: Vec<String> = versions.iter().map(|(call, ranks)| format!("{} called {call}", list(ranks))).collect();
                format!("starting at {}collective number {number}, the calls differ: {}", on(*backend), said.join("; "))
            }
            Finding::Behind { .. } => self.behind_in_words(group),
            Finding::AllWaiting { call, awaited } => {
                let waits = |(rank, others): &(usize, Vec<usize>)| match others.is_empty() {
                    true => format!("rank {rank} waits for ranks that are not known"),
                    false => format!("rank {rank} waits for {}", list(others)),
                };
                let said: Vec<String> = awaited.iter().map(waits).collect();
                format!("every rank has started {call}, but the call did not end: {}", said.join("; "))
            }
            Finding::OnDevice { call, ranks, seconds } => {
                format!(
                    "every rank has queued {call} on its device, but after {seconds:.1} s the call has not ended on the devices of {}; it waits \
                     for earlier work on its streams, or for a device that does not take part",
                    list(ranks)
                )
            }
            Finding::Message { rank, message, peer, answer } => {
                let peer = peer.map_or_else(String::new, |peer| group.name(peer));
                let answer = match answer {
                    Some(true) => format!("; {peer} has started the matching call"),
                    Some(false) => format!("; {peer} has not started the matching call"),
                    None if peer.is_empty() => String::new(),
                    None => format!("; there is no record of {peer}"),
                };
                format!("{} waited in {message}{answer}", group.name(*rank))
            }
            Finding::EndedEarly { rank, witnesses, reason } => {
                format!(
                    "{} ended before the others, and {} lost the connection to it; it wrote a record for this reason: {reason}",
                    group.name(*rank),
                    list(witnesses)
                )
            }
            Finding::Nothing { last: Some(last) } => format!("nothing is stuck: the calls agree up to number {last}"),
            Finding::Nothing { last: None } => "nothing is stuck: no calls are on record".to_owned(),
        }
    }

    fn behind_in_words(&self, group: &Group) -> String {
        let Finding::Behind { backend, rank, call, waiting, seconds, last, has_scheduled, elsewhere } = self else { return String::new() };
        let last = match last {
            None => "it has made no call yet".to_owned(),
            Some((call, State::Completed)) => format!("its last call, {call}, has ended, and the rank has started no other call"),
            Some((call, State::Started)) => format!("it is still in {call}"),
            Some((call, State::Failed)) => format!("its last call, {call}, failed"),
            Some((call, State::Scheduled)) => format!("the last call that it queued is {call}"),
        };
        let waited = match backend {
            Backend::Host => format!("in which {} waited for {seconds:.1} s", list(waiting)),
            Backend::Device => format!("which {} queued on the device", list(waiting)),
        };
        let scheduled = if *has_scheduled { "; the call that it has not reached is queued behind other background calls" } else { "" };
        let elsewhere = elsewhere.as_ref().map(|what| format!("; its process is in {what}")).unwrap_or_default();
        format!("{} is behind: it has not reached {call}, {waited}; {last}{scheduled}{elsewhere}", group.name(*rank))
    }
}

fn on(backend: Backend) -> &'static str {
    match backend {
        Backend::Host => "",
        Backend::Device => "device ",
    }
}
