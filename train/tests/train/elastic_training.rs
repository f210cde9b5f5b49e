//! The example `elastic_training`: its processes are killed and others join, and the result is that of a run without
//! changes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::common::programs::example as built;
use crate::common::ranks::{as_rank, free_port, patience};

/// The example itself, for its result without changes.
#[path = "../../examples/elastic_training.rs"]
#[allow(dead_code, reason = "the example's program is run as a process")]
mod example;

/// The processes of the example, which end with the test.
struct Trainers {
    children: Vec<Child>,
    lines: Receiver<(usize, String)>,
    sender: Sender<(usize, String)>,
    /// The addresses at which the processes can be joined, as far as they were printed.
    addresses: BTreeMap<usize, String>,
}

impl Trainers {
    /// Starts a process, as one that joins at these addresses, or with the variables that the command already has.
    fn add(&mut self, mut command: Command, addresses: Option<&str>) {
        if let Some(addresses) = addresses {
            command.env("COLLECTIVES_JOIN", addresses).stdout(Stdio::piped());
        }
        let (mut child, sender, number) = (command.spawn().unwrap(), self.sender.clone(), self.children.len());
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(std::result::Result::ok).for_each(|line| drop(sender.send((number, line)))));
        self.children.push(child);
    }

    /// Waits for a line of one of these processes that begins with `start`, and returns the process and the rest.
    fn wait_for(&mut self, from: &[usize], start: &str) -> (usize, String) {
        loop {
            let (number, line) =
                self.lines.recv_timeout(patience(60)).unwrap_or_else(|_| panic!("no process of {from:?} prints {start:?}"));
            println!("process {number}: {line}");
            if let Some(address) = line.strip_prefix("join at ") {
                self.addresses.insert(number, address.to_owned());
            }
            if let Some(rest) = line.strip_prefix(start).filter(|_| from.contains(&number)) {
                return (number, rest.to_owned());
            }
        }
    }

    /// Waits until one of these processes trains on a number of ranks.
    fn wait_for_ranks(&mut self, from: &[usize], ranks: usize) {
        while !self.wait_for(from, "step ").1.ends_with(&format!(": {ranks} ranks")) {}
    }
}

impl Drop for Trainers {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn training_through_three_deaths_and_three_arrivals_gives_the_result_of_an_undisturbed_run() {
    let program = built("elastic_training").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let stop = folder.path().join("stop");
    let command = || {
        let mut command = Command::new(&program);
        command.arg(&stop);
        command
    };
    let (sender, lines) = channel();
    let mut trainers = Trainers { children: Vec::new(), lines, sender, addresses: BTreeMap::new() };
    let port = free_port();
    for rank in 0..3 {
        let mut command = command();
        as_rank(&mut command, rank, 3, port).stderr(Stdio::inherit());
        trainers.add(command, None);
    }
    let mut living = vec![0, 1, 2];
    for _ in 0..3 {
        // The second line comes after more steps.
        (0..2).for_each(|_| trainers.wait_for_ranks(&living[..1], 3));
        // The oldest first, so the rank that began the job dies too.
        let killed = living.remove(0);
        trainers.children[killed].kill().unwrap();
        (0..2).for_each(|_| trainers.wait_for_ranks(&living[..1], 2));
        let newcomer = trainers.children.len();
        let addresses: Vec<&str> = living.iter().filter_map(|number| trainers.addresses.get(number)).map(String::as_str).collect();
        let addresses = addresses.join(",");
        trainers.add(command(), Some(&addresses));
        living.push(newcomer);
    }
    (0..2).for_each(|_| trainers.wait_for_ranks(&living[2..], 3));
    fs::write(&stop, "").unwrap();
    for _ in &living {
        let (number, result) = trainers.wait_for(&living, "result ");
        let (steps, parameters) = result.split_once(' ').unwrap();
        let mut expected = example::State::new();
        for _ in 0..steps.parse::<u64>().unwrap() {
            let gradient = example::gradient(&expected.parameters, 0..example::SAMPLES);
            expected.advance(&gradient);
        }
        let parameters: Vec<f64> = parameters.trim_matches(['[', ']']).split(", ").map(|text| text.parse().unwrap()).collect();
        let differs = |(ours, theirs): (&f64, &f64)| (ours - theirs).abs() > 1e-9;
        let some = parameters.iter().zip(&expected.parameters).find(|(ours, theirs)| differs((ours, theirs)));
        assert_eq!(some, None, "process {number} after {steps} steps");
        assert!(trainers.children[number].wait().unwrap().success());
    }
}
