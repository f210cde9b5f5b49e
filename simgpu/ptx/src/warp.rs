//! Instructions at which the threads of a warp meet: shuffles, votes, matches, reductions.

use crate::fault::FaultKind;
use crate::machine::{State, Thread};
use crate::program::{Meeting, Program, WarpSite};

/// A fault, with the thread of the warp that caused it.
pub(crate) type Failed = (usize, FaultKind);

fn site<'p>(program: &'p Program, thread: &Thread) -> Option<&'p WarpSite> {
    let State::Meeting(site) = thread.state else { return None };
    program.function(thread.function).warps.get(site as usize)
}

/// Lets threads meet if all of them have come; returns whether some have met. If `stuck`, the warp cannot go on
/// otherwise, so threads without a mask need not wait for more.
pub(crate) fn meet(program: &Program, warp: &mut [Thread], stuck: bool) -> Result<bool, Failed> {
    let mut met = false;
    for lane in 0..warp.len() {
        let Some(site) = site(program, &warp[lane]) else { continue };
        let Some(lanes) = company(warp, lane, site, stuck)? else { continue };
        hold(site, warp, lanes)?;
        members(lanes).for_each(|lane| warp[lane].resume());
        met = true;
    }
    Ok(met)
}

fn members(lanes: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| lanes >> lane & 1 == 1)
}

/// Returns the lanes that meet with this one, if all have come.
fn company(warp: &[Thread], lane: usize, site: &WarpSite, stuck: bool) -> Result<Option<u32>, Failed> {
    let here = |other: &Thread| other.state == warp[lane].state && (other.function, other.at) == (warp[lane].function, warp[lane].at);
    let together = warp.iter().filter(|other| here(other)).fold(0, |lanes, other| lanes | 1_u32 << other.lane);
    let Some(slot) = site.mask else { return Ok(stuck.then_some(together)) };
    let mask = warp[lane].slot(slot) as u32;
    if mask >> lane & 1 == 0 {
        return Err((
            lane,
            FaultKind::Divergence(format!("lane {lane} takes part in an instruction whose mask {mask:#010x} leaves it out")),
        ));
    }
    let live = warp.iter().filter(|other| other.state != State::Done).fold(0, |lanes, other| lanes | 1_u32 << other.lane);
    let needed = mask & live;
    if needed & !together != 0 {
        return Ok(None);
    }
    match members(needed).find(|&other| warp[other].slot(slot) as u32 != mask) {
        Some(other) => {
            let theirs = warp[other].slot(slot) as u32;
            Err((other, FaultKind::Divergence(format!("lanes {lane} and {other} meet with masks {mask:#010x} and {theirs:#010x}"))))
        }
        None => Ok(Some(needed)),
    }
}

fn hold(site: &WarpSite, warp: &mut [Thread], lanes: u32) -> Result<(), Failed> {
    let values: Vec<u64> = warp.iter().map(|thread| thread.slot(site.a)).collect();
    let votes = members(lanes).filter(|&lane| values[lane] & 1 == 1).fold(0, |votes, lane| votes | 1_u32 << lane);
    let mut results = Vec::new();
    for lane in members(lanes) {
        let (value, flag) = match site.meeting {
            Meeting::Sync => (0, false),
            Meeting::ActiveMask => (lanes.into(), false),
            Meeting::VoteAll => (u64::from(votes == lanes), false),
            Meeting::VoteAny => (u64::from(votes != 0), false),
            Meeting::VoteUniform => (u64::from(votes == 0 || votes == lanes), false),
            Meeting::Ballot => (votes.into(), false),
            Meeting::MatchAny => (equal(lanes, &values, lane).into(), false),
            Meeting::MatchAll => {
                let all = equal(lanes, &values, lane) == lanes;
                (if all { lanes.into() } else { 0 }, all)
            }
            Meeting::Reduce(fold) => (members(lanes).map(|lane| values[lane]).reduce(|a, b| fold(a, b, 0)).unwrap_or(0), false),
            _ => shuffled(site, warp, lanes, lane, &values)?,
        };
        results.push((lane, value, flag));
    }
    for (lane, value, flag) in results {
        site.to.iter().for_each(|&to| warp[lane].set(to, value));
        site.flag.iter().for_each(|&to| warp[lane].set(to, flag.into()));
    }
    Ok(())
}

/// Returns the lanes that have the same value as this one.
fn equal(lanes: u32, values: &[u64], lane: usize) -> u32 {
    members(lanes).filter(|&other| values[other] == values[lane]).fold(0, |same, other| same | 1 << other)
}

/// Returns the value that a lane receives, and whether its source was in range.
fn shuffled(site: &WarpSite, warp: &[Thread], lanes: u32, lane: usize, values: &[u64]) -> Result<(u64, bool), Failed> {
    let (amount, bounds) = ((warp[lane].slot(site.b) & 31) as i64, warp[lane].slot(site.c));
    let own = lane as i64;
    let (clamp, segment) = ((bounds & 31) as i64, (bounds >> 8 & 31) as i64);
    let (first, last) = (own & segment, own & segment | clamp & !segment);
    let source = match site.meeting {
        Meeting::ShuffleUp => own - amount,
        Meeting::ShuffleDown => own + amount,
        Meeting::ShuffleXor => own ^ amount,
        _ => first | amount & !segment,
    };
    let inside = if matches!(site.meeting, Meeting::ShuffleUp) { source >= last } else { source <= last };
    let source = if inside { source as usize } else { lane };
    if source >= 32 || lanes >> source & 1 == 0 {
        return Err((lane, FaultKind::Divergence(format!("lane {lane} shuffles a value from lane {source}, which does not take part"))));
    }
    Ok((values[source], inside))
}
