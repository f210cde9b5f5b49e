//! The manifests of examples/deploy. Pods are network namespaces with the variables that the manifest and Kubernetes
//! set.

use std::path::Path;

use crate::common::programs::program;
use crate::named_hosts::NamedHosts;
use crate::peer::{Peer, example};
use crate::{python, skip};

/// The text of a manifest.
struct Manifest {
    text: String,
}

impl Manifest {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/deploy").join(name);
        Self { text: std::fs::read_to_string(path).unwrap() }
    }

    /// Returns the value of the first line `key: value`, without quotes.
    fn value(&self, key: &str) -> &str {
        let values = self.text.lines().filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix(':'));
        values.map(|value| value.trim().trim_matches('"')).next().unwrap_or_else(|| panic!("no {key}"))
    }

    /// Returns the container's variables. One of them takes its value from the secret.
    fn variables(&self) -> Vec<(String, String)> {
        let lines: Vec<&str> = self.text.lines().skip_while(|line| line.trim() != "env:").skip(1).map(str::trim).collect();
        let pairs = lines.windows(2).filter_map(|pair| Some((pair[0].strip_prefix("- name: ")?, pair[1])));
        let value = |line: &str| match line.strip_prefix("value: ") {
            Some(value) => value.trim_matches('"').to_owned(),
            None => self.value("secret").to_owned(),
        };
        pairs.map(|(name, line)| (name.to_owned(), value(line))).collect()
    }

    /// Returns the words of the script that is the container's argument.
    fn script(&self) -> String {
        let lines = self.text.lines().skip_while(|line| line.trim() != "- >-").skip(1);
        lines.take_while(|line| line.trim() != "ports:").map(str::trim).collect::<Vec<_>>().join(" ")
    }
}

/// Runs a manifest's pods until all end, and returns what they printed. `command` appends the command to the
/// container's.
fn pods(net: u8, manifest: &Manifest, command: impl Fn(&mut std::process::Command)) -> Result<Vec<String>, String> {
    let count: usize = manifest.value("completions").parse().unwrap();
    assert_eq!(manifest.value("parallelism"), manifest.value("completions"), "a rank that is not started cannot be met");
    let (job, subdomain) = (manifest.value("name"), manifest.value("subdomain"));
    let hosts = NamedHosts::up(net, &(0..count).map(|pod| format!("{job}-{pod}.{subdomain}")).collect::<Vec<_>>())?;
    let pods: Vec<Peer> = (0..count)
        .map(|pod| {
            let mut container = hosts.command(pod, "env");
            container.args(["-i", &format!("JOB_COMPLETION_INDEX={pod}")]);
            container.args(manifest.variables().iter().map(|(name, value)| format!("{name}={value}")));
            command(&mut container);
            Peer::start(&mut container)
        })
        .collect();
    Ok(pods.into_iter().map(Peer::finish).collect())
}

#[test]
fn the_pods_of_an_indexed_job_are_ranks() {
    let manifest = Manifest::read("indexed-job.yaml");
    assert_eq!(manifest.value("completionMode"), "Indexed");
    assert!(manifest.text.contains("/gradient_averaging\""));
    match pods(41, &manifest, |container| {
        container.arg(example("gradient_averaging"));
    }) {
        Ok(printed) => assert!(printed[0].contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed:?}"),
        Err(why) => skip!("{why}"),
    }
}

#[test]
fn the_pods_of_a_job_under_collrun_are_nodes_of_several_ranks() {
    let collrun = match program("collrun") {
        Ok(collrun) => collrun,
        Err(why) => skip!("{why}"),
    };
    let manifest = Manifest::read("collrun-job.yaml");
    let script = manifest.script();
    assert!(script.starts_with("exec collrun ") && script.ends_with(" -- gradient_averaging"), "{script}");
    let folder = |program: &Path| program.parent().unwrap().to_str().unwrap().to_owned();
    let path = format!("{}:{}:/usr/bin:/bin", folder(&collrun), folder(&example("hello")));
    let run = |container: &mut std::process::Command| {
        container.args([&format!("PATH={path}"), "/bin/sh", "-c", &script]);
    };
    match pods(42, &manifest, run) {
        Ok(printed) => assert!(printed[0].contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed:?}"),
        Err(why) => skip!("{why}"),
    }
}

#[test]
fn torchrun_can_stand_in_collruns_place() {
    let python = python!();
    let mut manifest = Manifest::read("collrun-job.yaml");
    // PyTorch's store cannot prove that it knows a secret.
    manifest.text = manifest.text.replace("- name: COLLECTIVES_SECRET", "- name: UNUSED");
    let torchrun = format!("exec {} -W ignore -m torch.distributed.run --no-python ", python.program().display());
    let script = manifest
        .script()
        .replace("exec collrun ", &torchrun)
        .replace("gradient_averaging", example("gradient_averaging").to_str().unwrap());
    let run = |container: &mut std::process::Command| {
        container.args(["PATH=/usr/bin:/bin", "OMP_NUM_THREADS=1", "/bin/sh", "-c", &script]);
    };
    match pods(43, &manifest, run) {
        Ok(printed) => assert!(printed[0].contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed:?}"),
        Err(why) => skip!("{why}"),
    }
}
