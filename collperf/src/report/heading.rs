//! The text above the table, as in nccl-tests.

use crate::collective::Collective;
use crate::facts::{Gpu, Note, RankFacts, RunFacts};
use crate::settings::{Blocking, Settings};

/// Returns the lines from the version down to the ranks.
pub(super) fn heading(settings: &Settings, facts: &RunFacts, collective: Collective) -> String {
    let (step, kind) = match settings.step {
        Some(crate::sizes::Step::Factor(factor)) => (factor, "factor"),
        Some(crate::sizes::Step::Bytes(bytes)) => (bytes, "bytes"),
        None => (0, "list"),
    };
    let (least, most) = (settings.sizes.iter().min().unwrap_or(&0), settings.sizes.iter().max().unwrap_or(&0));
    let mut text = format!(
        "# collperf version {} nccl-headers={} nccl-library={}\n# Collective test starting: {}\n\
         # nThread {} nGpus {} minBytes {least} maxBytes {most} step: {step}({kind}) warmup iters: {} iters: {} agg iters: {} \
         validation: {} graph: {} unalign: {}\n",
        env!("CARGO_PKG_VERSION"),
        facts.on.headers(),
        facts.on.library(),
        collective.program(),
        settings.threads.unwrap_or(1),
        gpus_of_thread(settings, facts),
        settings.warmup,
        settings.iterations,
        settings.aggregated,
        settings.check,
        settings.device.graph,
        settings.unalign,
    );
    notes(&mut text, settings, facts, collective);
    text += "#\n# Using devices\n";
    for RankFacts { peer, group, local_rank, processor, gpu } in &facts.ranks {
        let (device, bus, name) = match gpu {
            Some(Gpu { ordinal, bus, name }) => (ordinal, &bus[..], name),
            None => (local_rank, "host", processor),
        };
        text += &format!(
            "#  Rank {:>2} Group {:>2} Pid {:>6} on {:>10} device {device:>2} [{bus}] {name}\n",
            peer.rank, group, peer.pid, peer.host
        );
    }
    text
}

/// Returns the number of GPUs of a thread of rank 0's process, as nccl-tests counts them; 0 on the host backend.
pub(super) fn gpus_of_thread(settings: &Settings, facts: &RunFacts) -> usize {
    let same_process = |rank: &&RankFacts| (&rank.peer.host, rank.peer.pid) == (&facts.ranks[0].peer.host, facts.ranks[0].peer.pid);
    match facts.on.is_device() && !facts.ranks.is_empty() {
        true => facts.ranks.iter().filter(same_process).count() / settings.threads.unwrap_or(1),
        false => 0,
    }
}

/// Adds notes on what is unusual about a run.
fn notes(text: &mut String, settings: &Settings, facts: &RunFacts, collective: Collective) {
    match settings.blocking {
        Blocking::No => {}
        Blocking::Wait => *text += "# Blocking Enabled: wait for completion of each call\n",
        Blocking::Barrier => *text += "# Blocking Enabled: wait for completion and barrier after each call; time includes barrier\n",
        Blocking::UntimedBarrier => *text += "# Blocking Enabled: wait for completion and barrier after each call; time excludes barrier\n",
    }
    if settings.columns.predictions {
        *text += PREDICTIONS;
    }
    for Note { text: note, is_warning } in facts.notes() {
        *text += &format!("# {}{note}\n", if is_warning { "note: " } else { "" });
    }
    if facts.on.is_device() && collective == Collective::Barrier {
        *text += "# A barrier runs on the host backend, even with --backend device\n";
    }
}

/// The meaning of the columns of predictions.
const PREDICTIONS: &str = "# algorithm: the library's algorithm for a call of this size\n\
    # predicted: the predicted time, interpolated from the times that this run measured for six sizes\n\
    # ratio: predicted time divided by measured time\n";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::markdown;
    use super::*;
    use crate::arguments::Arguments;
    use crate::facts::{Bound, On};

    #[test]
    fn the_heading_is_that_of_nccl_tests() {
        let settings = Settings::new(
            &Arguments::parse_from(["collperf", "broadcast", "-b", "8", "-e", "1K"]),
            &crate::environment::Environment::default(),
        )
        .unwrap();
        let expected = concat!(
            "# collperf version ",
            env!("CARGO_PKG_VERSION"),
            " nccl-headers=0 nccl-library=0\n",
            "# Collective test starting: broadcast_perf\n",
            "# nThread 1 nGpus 0 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0\n",
            "#\n",
            "# Using devices\n",
            "#  Rank  0 Group  0 Pid    100 on       desk device  0 [host] Abacus 9\n",
            "#  Rank  1 Group  0 Pid    101 on       desk device  1 [host] Abacus 9\n",
        );
        assert_eq!(heading(&settings, &RunFacts::example(2), Collective::Broadcast), expected);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn devices_are_named_as_nccl_tests_names_them() {
        let settings = Settings::new(
            &Arguments::parse_from(["collperf", "broadcast", "-G", "4", "-z", "2"]),
            &crate::environment::Environment::default(),
        )
        .unwrap();
        let text = heading(&settings, &RunFacts::example_on_devices(2), Collective::Broadcast);
        let expected = [
            " nccl-library=22809\n",
            "# nThread 1 nGpus 1 ",
            " graph: 4 ",
            "# Blocking Enabled: wait for completion of each call\n",
            "#  Rank  1 Group  0 Pid    101 on       desk device  1 [0000:01:00] Soroban 2 GPU\n",
        ];
        expected.into_iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in\n{text}"));
        let barrier = heading(&settings, &RunFacts::example_on_devices(1), Collective::Barrier);
        assert!(barrier.contains("# A barrier runs on the host backend"), "{barrier}");
    }

    #[test]
    fn a_run_that_fell_back_says_why() {
        let settings =
            Settings::new(&Arguments::parse_from(["collperf", "broadcast"]), &crate::environment::Environment::default()).unwrap();
        let facts = RunFacts { on: On::Host { why: Some("no driver".to_owned()) }, ..RunFacts::example(1) };
        let text = heading(&settings, &facts, Collective::Broadcast);
        assert!(text.contains("# Measured on the host backend, because there is no device backend: no driver\n"), "{text}");
    }

    #[test]
    fn what_a_reader_has_to_know_stands_above_the_table() {
        let settings =
            |line: &str| Settings::new(&Arguments::parse_from(line.split(' ')), &crate::environment::Environment::default()).unwrap();
        let mut facts = RunFacts { is_encrypted: true, ..RunFacts::example(2) };
        facts.machine.load = Some(crate::machine::Load { busy: 1.4, cores: 2 });
        facts.bound = Some(Bound { to: "core".to_owned(), why_none: None, processors: vec!["0".to_owned(), "1,3".to_owned()] });
        let text = heading(&settings("collperf broadcast --explain"), &facts, Collective::Broadcast);
        for line in [
            "bound to: core (rank 0: cpu 0, rank 1: cpus 1,3)",
            "Links between hosts are encrypted",
            "note: other programs keep 1.4 of 2 cores busy, so times will be too high",
            "ratio: predicted time divided by measured time",
        ] {
            assert!(text.contains(&format!("# {line}\n")), "{line:?} is not in\n{text}");
        }
        let text = heading(&settings("collperf broadcast"), &RunFacts::example(2), Collective::Broadcast);
        assert!(!text.contains("encrypted") && !text.contains("note:") && !text.contains("ratio:"), "{text}");
        let text = markdown::heading(&settings("collperf broadcast --markdown"), &facts, Collective::Broadcast);
        assert!(text.contains("\nNote: other programs keep 1.4 of 2 cores busy") && text.contains("encrypted"), "{text}");
    }
}
