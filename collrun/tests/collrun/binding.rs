//! The processors that `collrun`'s ranks may use, and the number of threads that they are asked to start.

use std::process::{Command, Output, Stdio};

use crate::processors::{Processors, allowed_here, core_count, on_one_processor, read_list};

/// Returns a `collrun` command with flags (split at blanks) and a shell script for every rank.
fn collrun(flags: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.args(flags.split_whitespace()).args(["--", "sh", "-c", script]).stdin(Stdio::null());
    command.env_remove("OMP_NUM_THREADS").env_remove("RAYON_NUM_THREADS");
    command
}

/// Returns the line that each rank printed, in rank order.
#[track_caller]
fn lines(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{output:?}");
    let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines.iter().map(|line| line.split_once("] ").unwrap().1.to_owned()).collect()
}

/// Returns the processors that the kernel lets each rank use.
#[track_caller]
fn masks(flags: &str) -> Vec<Processors> {
    let output = collrun(flags, "sed -n 's/^Cpus_allowed_list:[[:blank:]]*//p' /proc/self/status").output().unwrap();
    lines(&output).iter().map(|line| read_list(line)).collect()
}

/// Returns the processors of this machine, if they belong to at least two cores.
fn of_two_cores() -> Option<Processors> {
    let here = allowed_here();
    if core_count(&here) < 2 {
        println!("skipped in part: two cores are needed, and {} may be used", core_count(&here));
        return None;
    }
    Some(here)
}

#[test]
fn ranks_have_cores_of_their_own_where_there_are_enough() {
    let Some(here) = of_two_cores() else { return };
    for flags in ["--nproc-per-node 2", "-n 2 --bind core", "-n 2 --bind-to core", "-np 2 -bind-to core"] {
        let masks = masks(flags);
        assert!(masks.len() == 2 && masks[0].is_disjoint(&masks[1]), "{flags}: {masks:?}");
        assert!(masks.iter().all(|mask| !mask.is_empty() && mask.is_subset(&here)), "{flags}: {masks:?}");
        // Each rank has half of the cores; only an odd one is left.
        let cores: Vec<usize> = masks.iter().map(core_count).collect();
        assert_eq!(cores, [core_count(&here) / 2; 2], "{flags}: {masks:?}");
    }
}

#[test]
fn who_is_not_to_be_bound_runs_where_this_process_may() {
    let here = allowed_here();
    assert_eq!(masks("-n 2 --bind none"), [here.clone(), here.clone()]);
    assert_eq!(masks("-n 1"), vec![here.clone(); 1]);
    let many = here.len() + 1;
    assert_eq!(masks(&format!("-n {many}")), vec![here.clone(); many]);
    let refused = collrun(&format!("-n {many} --bind core"), "true").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(said.starts_with(&format!("collrun: --bind core: {many} ranks, but only ")) && said.lines().count() == 1, "{said}");
}

#[test]
fn torchrun_s_words_spread_ranks_evenly_on_a_host_without_gpus() {
    if std::path::Path::new("/proc/driver/nvidia").exists() {
        return println!("skipped: this machine has GPUs, near which ranks are bound");
    }
    let here = allowed_here();
    for (words, ours) in [("node", "numa"), ("core-complex", "cache")] {
        assert_eq!(masks(&format!("-n 2 --numa-binding {words}")), masks(&format!("-n 2 --bind {ours}")), "{words}");
    }
    assert!(masks("-n 3 --numa_binding=socket").iter().all(|mask| !mask.is_empty() && mask.is_subset(&here)));
    assert_eq!(masks("-n 1 --numa-binding exclusive"), masks("-n 1 --bind core"));
    let refused = collrun("--numa-binding near", "true").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("expected node, socket, exclusive or core-complex"), "{said}");
}

#[test]
fn caches_and_nodes_have_all_of_their_processors() {
    let here = allowed_here();
    for flags in ["-n 3 --bind cache", "-n 3 --bind numa", "-n 3 --bind-to l3cache"] {
        let masks = masks(flags);
        assert!(masks.len() == 3 && masks.iter().all(|mask| !mask.is_empty() && mask.is_subset(&here)), "{flags}: {masks:?}");
        let are_apart = |one: &Processors, other: &Processors| one == other || one.is_disjoint(other);
        assert!(are_apart(&masks[0], &masks[1]) && are_apart(&masks[1], &masks[2]), "{flags}: {masks:?}");
    }
    let refused = collrun("-n 2 --bind-to socket", "true").output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("expected none, core, cache (or l3cache) or numa"), "{refused:?}");
}

#[test]
fn a_mask_that_was_inherited_is_kept_to() {
    let (one, masks) = on_one_processor(|| masks("-n 2"));
    assert_eq!(masks, vec![Processors::from([one]); 2]);
    let (_, refused) = on_one_processor(|| collrun("-n 2 --bind core", "true").output().unwrap());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("2 ranks, but only 1 core may be used"), "{refused:?}");
}

#[test]
fn what_ranks_are_bound_to_is_said_where_that_is_asked_for() {
    let said = |flags: &str| {
        let output = collrun(&format!("--report-bindings {flags}"), "true").output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(said("-n 2 --bind none"), "collrun: bound to: none\n");
    let (one, crowded) = on_one_processor(|| said("-n 2"));
    assert_eq!(crowded, "collrun: bound to: none (2 ranks, but only 1 processor may be used)\n");
    let (_, alone) = on_one_processor(|| said("-n 1"));
    assert_eq!(alone, format!("collrun: bound to: core (rank 0: cpu {one})\n"));
    let Some(here) = of_two_cores() else { return };
    let first = here.first().unwrap();
    assert!(said("-n 2").starts_with(&format!("collrun: bound to: core (rank 0: cpu{}", if here.len() > 2 { "s" } else { "" })), "{first}");
}

#[test]
fn ranks_are_told_how_many_threads_keep_their_processors_busy() {
    let script = "echo ${OMP_NUM_THREADS-unset} ${RAYON_NUM_THREADS-unset}";
    // A container may have less processor time than its processors provide.
    let available = std::thread::available_parallelism().unwrap().get();
    let share = (available / 2).max(1);
    for flags in ["-n 2", "-n 2 --bind none"] {
        let told = lines(&collrun(flags, script).output().unwrap());
        let counts: Vec<usize> = told[0].split(' ').map(|count| count.parse().unwrap()).collect();
        assert!(counts[0] == counts[1] && (1..=share).contains(&counts[0]), "{flags}: {told:?}");
        assert_eq!(told[0], told[1]);
    }
    assert_eq!(lines(&collrun("-n 2 --bind none", script).output().unwrap()), vec![format!("{share} {share}"); 2]);
    assert_eq!(lines(&collrun(&format!("-n {}", available + 1), script).output().unwrap())[0], "1 1");
    assert_eq!(lines(&collrun("-n 1", script).output().unwrap()), ["unset unset"], "a rank alone has all of them anyway");
    let set = collrun("-n 2", script).env("OMP_NUM_THREADS", "7").env("RAYON_NUM_THREADS", "3").output().unwrap();
    assert_eq!(lines(&set), ["7 3", "7 3"], "what the user has set stays");
}
