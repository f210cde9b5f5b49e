//! Tests of the decisions: a table of events with what follows from each, and simulated jobs whose hosts come, go, fail
//! and fall silent in random order.

use std::collections::BTreeMap;
use std::time::Duration;

use super::membership::{Action, Membership, Rules};
use super::messages::{Arrival, Message, Report, Start};
use crate::event::{Change, Settled};
use crate::failure::Failure;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const RULES: Rules = Rules { least: 2, most: 3, last_call: seconds(30), lost_after: seconds(15), join: seconds(600), restarts: 1 };

fn failure() -> Settled {
    let text = br#"{"host": "a", "rank": 1, "local_rank": 1, "pid": 7, "ended": "exit code 3", "code": 3, "time": 0, "cause": null}"#;
    Settled::Failed(Box::new(Failure::from_json(text).unwrap()))
}

/// A job whose hosts obey: each runs ranks from a `Start` on until `free`.
struct World {
    membership: Membership,
    now: u64,
    beats: u64,
    /// By name: the arrival, whether it answers, how many messages it has dealt with, and its last message.
    hosts: BTreeMap<String, Simulated>,
    end: Option<Settled>,
    said: Vec<String>,
}

struct Simulated {
    is_silent: bool,
    given: u64,
    ready: u64,
    start: Option<Start>,
    last: Option<Message>,
}

impl World {
    fn new(rules: Rules) -> Self {
        let membership = Membership::new(rules, "a".to_owned());
        Self { membership, now: 0, beats: 0, hosts: BTreeMap::new(), end: None, said: vec![] }
    }

    fn come(&mut self, name: &str) -> &mut Self {
        self.hosts.insert(name.to_owned(), Simulated { is_silent: false, given: 0, ready: 0, start: None, last: None });
        self.membership.arrive(seconds(self.now), Arrival { id: name.to_owned(), name: name.to_uppercase(), ranks: 2 });
        self.look()
    }

    fn silence(&mut self, name: &str) -> &mut Self {
        self.hosts.get_mut(name).unwrap().is_silent = true;
        self
    }

    /// Passes time in looks of a second.
    fn wait(&mut self, seconds: u64) -> &mut Self {
        for _ in 0..seconds {
            self.now += 1;
            self.look();
        }
        self
    }

    /// The attempt ends, and the hosts that run stop their ranks.
    fn ends(&mut self, end: Settled) -> &mut Self {
        self.end.get_or_insert(end);
        self.look()
    }

    fn free(&mut self) -> &mut Self {
        for host in self.hosts.values_mut().filter(|host| !host.is_silent) {
            host.ready = host.given;
        }
        self.look()
    }

    fn look(&mut self) -> &mut Self {
        self.beats += 1;
        let now = seconds(self.now);
        for (id, host) in self.hosts.iter().filter(|(_, host)| !host.is_silent) {
            self.membership.hear(now, id, Report { beat: self.beats, ready: host.ready, leaves: None });
        }
        let actions = self.membership.step(now, self.end.as_ref(), false);
        self.perform(actions)
    }

    fn perform(&mut self, actions: Vec<Action>) -> &mut Self {
        for action in actions {
            match action {
                Action::Tell { id, number, message } => {
                    let host = self.hosts.get_mut(&id).unwrap();
                    assert_eq!(number, host.given, "messages to {id} are numbered without a gap");
                    host.given += 1;
                    if let Message::Start(start) = &message {
                        self.end = None;
                        host.start = Some(start.clone());
                    }
                    host.last = Some(message);
                }
                Action::Settle { attempt, change } => {
                    assert_eq!(attempt, self.membership.attempt());
                    self.end.get_or_insert(Settled::Changed(change));
                }
                Action::Say(text) => self.said.push(text),
            }
        }
        self
    }

    /// Returns the hosts of the attempt that runs, by their numbers.
    fn running(&self) -> String {
        if !self.membership.is_running() || self.end.is_some() {
            return String::new();
        }
        let of_attempt = |host: &&Simulated| host.start.as_ref().is_some_and(|start| start.attempt == self.membership.attempt());
        let start = self.hosts.values().find(of_attempt).and_then(|host| host.start.as_ref());
        start.map_or_else(String::new, |start| start.names.join(" "))
    }

    fn last(&self, name: &str) -> String {
        match &self.hosts[name].last {
            Some(Message::Over { code, why }) => format!("{code} {}", why.as_deref().unwrap_or_default()),
            other => format!("{other:?}"),
        }
    }

    fn change(&self) -> &Change {
        let Some(Settled::Changed(change)) = &self.end else { panic!("{:?}", self.end) };
        change
    }
}

#[test]
fn a_job_starts_when_all_have_come_or_after_the_last_call() {
    let mut world = World::new(RULES);
    assert_eq!(world.come("a").wait(100).running(), "", "too few");
    assert_eq!(world.come("b").wait(29).running(), "", "the last call has begun");
    assert_eq!(world.wait(1).running(), "A B");
    assert!(world.said[0].starts_with("2 of at most 3 hosts have come; the job starts in 30 s"), "{:?}", world.said);
    let mut world = World::new(RULES);
    assert_eq!(world.come("a").come("b").come("c").running(), "A B C", "all have come");
    // A host that is lost before the start ends the last call.
    let mut world = World::new(RULES);
    assert_eq!(world.come("a").come("b").wait(10).silence("b").wait(40).running(), "");
    assert_eq!(world.come("c").wait(29).running(), "");
    assert_eq!(world.wait(1).running(), "A C");
    // The host that serves the store is node 0, even if it arrives last.
    let mut world = World::new(RULES);
    assert_eq!(world.come("c").come("b").come("a").running(), "A C B");
}

#[test]
fn too_few_hosts_end_the_job_in_time() {
    let mut world = World::new(RULES);
    assert_eq!(world.come("a").wait(599).hosts["a"].last, None);
    assert!(world.wait(1).last("a").starts_with("1 the job needs at least 2 hosts, and has 1 after 600 s"), "{}", world.last("a"));
    assert_eq!(world.come("b").last("b"), "1 the job has ended");
    // The same after a loss; the lost host is named.
    let mut world = World::new(RULES);
    world.come("a").come("b").wait(30).silence("b").wait(16).free().wait(599);
    assert!(matches!(world.hosts["a"].last, Some(Message::Start(_))));
    let said = world.wait(2).last("a");
    assert!(said.ends_with("has 1 after 600 s; lost node 1 (B): its collrun has not answered for 15 s"), "{said}");
}

#[test]
fn a_lost_host_ends_the_attempt_and_the_others_start_again_in_order() {
    let mut world = World::new(RULES);
    world.come("a").come("b").come("c").silence("b").wait(15);
    assert_eq!(world.running(), "A B C", "it may still answer");
    world.wait(1);
    assert_eq!(
        world.change(),
        &Change { why: "lost node 1 (B): its collrun has not answered for 15 s".into(), is_loss: true, is_last: false }
    );
    assert!(matches!(world.hosts["b"].last, Some(Message::LeftOut(_))));
    assert_eq!(world.wait(5).running(), "", "the ranks of A and C still stop");
    assert_eq!(world.free().running(), "A C");
    let start = world.hosts["c"].start.clone().unwrap();
    assert_eq!((start.attempt, start.node, start.failures), (1, 1, 1));
    // One restart is allowed: the next loss ends the job, and names the host.
    let said = world.silence("c").wait(16).free().last("a");
    assert_eq!(said, "1 lost node 1 (C): its collrun has not answered for 15 s");
}

#[test]
fn failures_are_counted_and_those_who_come_are_not() {
    let mut world = World::new(RULES);
    world.come("a").come("b").wait(30);
    world.come("c");
    assert_eq!((world.change().why.as_str(), world.change().is_loss), ("new hosts: C", false));
    assert_eq!(world.free().running(), "A B C");
    assert_eq!(world.hosts["a"].start.as_ref().map(|start| (start.attempt, start.failures)), Some((1, 0)));
    // A spare waits until there is room, and changes nothing.
    assert_eq!(world.come("d").wait(100).running(), "A B C");
    // A host that failed because another one is gone waits for that one to be given up.
    assert_eq!(world.silence("b").ends(failure()).free().wait(10).running(), "");
    assert_eq!(world.wait(10).running(), "A C D");
    assert!(world.said.iter().any(|said| said.starts_with("lost node 1 (B)")), "{:?}", world.said);
    world.ends(failure()).free();
    assert_eq!(["a", "c", "d"].map(|name| world.last(name)), ["1 ", "1 ", "1 "], "no restart is left");
}

#[test]
fn spares_end_with_the_job_and_others_are_refused() {
    let mut world = World::new(RULES);
    world.come("a").come("b").come("c").come("d").ends(Settled::Done);
    assert_eq!(world.last("d"), "0 the job has ended without needing this host");
    assert!(matches!(world.hosts["a"].last, Some(Message::Start(_))), "those that took part know");
    let mut world = World::new(RULES);
    world.come("a");
    world.hosts.insert("x".to_owned(), Simulated { is_silent: false, given: 0, ready: 0, start: None, last: None });
    world.membership.arrive(seconds(0), Arrival { id: "x".to_owned(), name: "X".to_owned(), ranks: 4 });
    assert_eq!(world.look().last("x"), "2 X starts 4 ranks, and the other hosts start 2; give every host the same --nproc-per-node");
}

#[test]
fn a_job_that_begins_to_end_takes_no_more_hosts() {
    let mut world = World::new(RULES);
    world.come("a").come("b").wait(30);
    world.membership.arrive(seconds(world.now), Arrival { id: "c".to_owned(), name: "C".to_owned(), ranks: 2 });
    assert_eq!(world.membership.step(seconds(world.now), None, true), []);
    assert!(matches!(&world.membership.step(seconds(world.now), None, false)[..], [Action::Settle { .. }]));
}

#[test]
fn a_coordinator_that_did_not_run_gives_up_no_host_for_that() {
    let mut world = World::new(RULES);
    world.come("a").come("b").come("c");
    // The clock jumps, and the others' reports have not moved yet.
    world.now += 1000;
    assert_eq!(world.membership.step(seconds(world.now), None, false), []);
    assert_eq!(world.wait(100).running(), "A B C");
}

#[test]
fn a_host_that_stops_its_ranks_or_its_coordinator_ends_the_attempt() {
    let mut world = World::new(RULES);
    world.come("a").come("b").come("c");
    let busy = world.hosts["b"].given;
    world.hosts.get_mut("b").unwrap().ready = busy;
    assert_eq!(world.look().change().why, "node 1 (B) has ended its ranks");
    let mut world = World::new(RULES);
    world.come("a").come("b").come("c").come("d");
    let actions = world.membership.close("lost node 0 (A)");
    world.perform(actions);
    assert!(world.change().is_last && world.last("d") == "1 lost node 0 (A)" && world.last("b") == "1 lost node 0 (A)");
    assert_eq!(world.membership.close("again"), []);
}

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Simulates a job, and checks after each event what must hold always. In the end no event comes any more, and the job
/// must run, be over, or wait for hosts for a limited time.
fn simulate(seed: u64) {
    let mut random = Random(seed);
    let (least, most) = (1 + random.below(3) as usize, 3 + random.below(3) as usize);
    let rules = Rules { least, most, restarts: random.below(6) as u32, join: seconds(60), ..RULES };
    let mut world = World::new(rules);
    world.come("a");
    let mut next = b'b';
    for _ in 0..60 {
        match random.below(7) {
            0 if next < b'w' => {
                world.come(&char::from(next).to_string());
                next += 1;
            }
            1 => {
                let names: Vec<String> = world.hosts.keys().filter(|name| *name != "a").cloned().collect();
                if !names.is_empty() {
                    world.silence(&names[random.below(names.len() as u64) as usize]);
                }
            }
            2 if !world.running().is_empty() => {
                world.ends(failure());
            }
            3 => {
                world.wait(1 + random.below(40));
            }
            _ if world.end.is_some() => {
                world.free();
            }
            _ => {
                world.wait(1);
            }
        }
        check(&world, &rules, seed);
    }
    world.free().wait(1).free().wait(20).free().wait(100).free().wait(5);
    let is_over = matches!(world.hosts["a"].last, Some(Message::Over { .. }));
    assert!(is_over || !world.running().is_empty(), "seed {seed}: stuck: {:?}", world.hosts["a"].last);
}

fn check(world: &World, rules: &Rules, seed: u64) {
    let attempt = world.membership.attempt();
    let of_attempt = world.hosts.values().filter_map(|host| host.start.as_ref()).filter(|start| start.attempt == attempt);
    let mut nodes: Vec<usize> = of_attempt.clone().map(|start| start.node).collect();
    nodes.sort_unstable();
    let Some(first) = of_attempt.clone().next() else { return };
    assert!(of_attempt.clone().all(|start| start.names == first.names), "seed {seed}: all know the same hosts");
    assert_eq!(nodes, (0..first.names.len()).collect::<Vec<_>>(), "seed {seed}: each number is given once");
    assert!((rules.least..=rules.most).contains(&nodes.len()), "seed {seed}: {nodes:?}");
    assert!(first.names[0] == "A" && first.failures <= rules.restarts, "seed {seed}: {first:?}");
    // A host that is given up takes part in no later attempt.
    let has_ended = |host: &Simulated| matches!(host.last, Some(Message::LeftOut(_) | Message::Over { .. }));
    let revived = world.hosts.values().filter(|host| has_ended(host)).count() + world.membership.ids().count();
    assert_eq!(revived, world.hosts.len(), "seed {seed}: a host is in the job, or knows that it is not");
}

#[test]
fn random_jobs_agree_on_their_hosts_and_never_hang() {
    let more = std::env::var("COLLECTIVES_ELASTIC").ok().and_then(|count| count.parse().ok());
    (0..more.unwrap_or(1000)).for_each(simulate);
}
