"""Runs the tests that PyTorch ships for its backends, from the installed wheel, on this backend.

usage: pytorch_suite.py [--suite backends|ddp-with-rpc] [--backend collectives|gloo] [--world-size N] [--jobs N] [--seconds N] [--keep FILE] [--hold-against FILE]
                        [--verbose] [TEST ...]

"backends" are the tests for backends on N ranks. "ddp-with-rpc" are those of DDP with RPC, on as many ranks as each
needs. PyTorch's test file checks by name what a backend can do, and does not know ours. So ours is registered as Gloo,
of which the same is expected. No test is left out here. Ranks are forked from a process that has imported everything,
because an import takes longer than a test.

`--keep` writes the outcome of each test, with PyTorch's reason for skipping. `--hold-against` compares with such a
file. It fails if a test no longer passes, is skipped newly or for another reason, or is missing in the file.
"""

import argparse
import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import unittest
from collections import Counter

# Tests that check the backend's name. In these it has its own.
OF_THE_NAME = ["test_ddp_logging_data_cpu"]
# PyTorch skips some tests for this reason although they do not need MPI. Here every backend runs them.
OF_MPI = "Only MPI supports"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=["backends", "ddp-with-rpc"], default="backends")
    parser.add_argument("--backend", choices=["collectives", "gloo"], default="collectives")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=max(3, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=int, default=60, help="how long one test may take")
    parser.add_argument("--keep")
    parser.add_argument("--hold-against")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks of failed tests printed")
    parser.add_argument("tests", nargs="*")
    return parser.parse_args()


def environment(options, folder):
    """Sets the variables that PyTorch's test file reads when it is imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(options.world_size),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/shared_init_file",
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.seconds),
        TORCH_CPP_LOG_LEVEL="ERROR",
    )


def suite_classes(options):
    """Returns the test classes of a suite, with ranks on the backend."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.backend == "collectives":
        from collectives_torch import CollectivesProcessGroup

        def create(given, _options=None):
            return CollectivesProcessGroup(given.store, given.group_rank, given.group_size, given.timeout)

        dist.Backend.register_backend("gloo", create, extended_api=True, devices=["cpu"])
    return of_backends(options) if options.suite == "backends" else of_ddp_with_rpc()


def forked(*bases):
    """Returns a test class whose ranks are forked."""
    import torch

    class Suite(*bases):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *arguments, **named):
            # In a forked process, PyTorch creates a new thread pool on first use, and aborts if two threads do so at
            # once.
            torch.set_num_threads(1)
            super()._run(*arguments, **named)

    return Suite


def of_backends(options):
    from torch.testing._internal.distributed import distributed_test

    if options.backend == "collectives":
        # Profiler events begin on one thread and end on another, which is possible only for works in C++. The calls are
        # still tested.
        distributed_test.PROFILING_SUPPORTED_BACKENDS = []
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    suite = forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase)
    for name in names_of(suite):
        test = getattr(suite, name)
        if getattr(test, "__unittest_skip_why__", "").startswith(OF_MPI):
            test.__unittest_skip__ = False
    return [suite]


def of_ddp_with_rpc():
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as tests
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    classes = (tests.DdpUnderDistAutogradTest, tests.DdpComparisonTest, tests.CudaDdpComparisonTest)
    return [forked(TensorPipeRpcAgentTestFixture, each, MultiProcessTestCase) for each in classes]


def names_of(suite):
    return unittest.TestLoader().getTestCaseNames(suite)


def run_one(suite, name, channel, backend, verbose):
    """Runs a test in its own process, from which the ranks are forked, with its own folders."""
    os.setpgid(0, 0)
    folder = tempfile.mkdtemp(prefix="collectives-torch-")
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/shared_init_file")
    # Killed ranks leave their files there.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    module = sys.modules.get("torch.testing._internal.distributed.distributed_test")
    if module:
        module.INIT_METHOD = os.environ["INIT_METHOD"]
        if name in OF_THE_NAME and backend == "collectives":
            module.BACKEND = backend
    log = open(f"{folder}/log", "w+")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    result = unittest.TestResult()
    began = time.monotonic()
    try:
        suite(name).run(result)
    finally:
        outcome = "skipped" if result.skipped else "passed" if result.wasSuccessful() else "failed"
        problem = "".join(text for _, text in result.failures + result.errors) or "".join(reason for _, reason in result.skipped[:1])
        log.flush()
        if outcome == "failed" and verbose:
            log.seek(0)
            problem += log.read()
        channel.send((outcome, time.monotonic() - began, problem))
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def run_all(options, tests):
    """Runs tests (a map from name to class) in parallel and returns the outcome of each."""
    context = multiprocessing.get_context("fork")
    outcomes, waiting, running = {}, list(reversed(tests)), {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(tests[name], name, theirs, options.backend, options.verbose))
            process.start()
            theirs.close()
            running[mine] = (name, process, time.monotonic())
        for channel in multiprocessing.connection.wait(list(running), timeout=1):
            name, process, _ = running.pop(channel)
            try:
                outcomes[name] = channel.recv()
            except EOFError:
                outcomes[name] = ("failed", 0.0, "the process died")
            process.join()
            stop_group(process.pid)
            report(name, outcomes[name])
        for channel, (name, process, began) in list(running.items()):
            if time.monotonic() - began > 2 * options.seconds:
                stop_group(process.pid)
    return outcomes


def stop_group(leader):
    try:
        os.killpg(leader, 9)
    except ProcessLookupError:
        pass


def report(name, outcome):
    kind, seconds, problem = outcome
    if kind == "failed":
        print(f"{name}: failed after {seconds:.1f} s\n{problem.rstrip()}\n", flush=True)


def main():
    options = arguments()
    faulthandler.enable()
    folder = tempfile.mkdtemp(prefix="collectives-torch-")
    environment(options, folder)
    began = time.monotonic()
    tests = {name: suite for suite in suite_classes(options) for name in names_of(suite)}
    outcomes = run_all(options, {name: tests[name] for name in options.tests or tests})
    shutil.rmtree(folder, ignore_errors=True)
    found = {name: "skipped: " + " ".join(problem.split()) if kind == "skipped" else kind for name, (kind, _, problem) in outcomes.items()}
    counts = Counter(kind for kind, _, _ in outcomes.values())
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "skipped", "failed"))
    print(f"{options.backend}, {ranks(options)}: {summary}, in {time.monotonic() - began:.0f} s")
    for outcome, names in by_outcome(found):
        if outcome.startswith("skipped"):
            print(f"  {len(names):3} {outcome}")
    sys.stdout.flush()
    if options.keep:
        keep(options, found)
    sys.exit(0 if judge(options, found) else 1)


def ranks(options):
    return f"{options.world_size} ranks" if options.suite == "backends" else "DDP with RPC"


def by_outcome(found):
    """Returns outcomes with the names of their tests: passed ones first, then by number of tests."""
    names = {}
    for name, outcome in sorted(found.items()):
        names.setdefault(outcome, []).append(name)
    return sorted(names.items(), key=lambda entry: (entry[0] != "passed", -len(entry[1]), entry[0]))


def keep(options, found):
    with open(options.keep, "w") as file:
        file.write(f"# What became of PyTorch's tests with {options.backend}, {ranks(options)}: pytorch_suite.py --keep writes this.\n")
        for outcome, names in by_outcome(found):
            file.writelines([f"{outcome}\n", *(f"    {name}\n" for name in names)])


def kept(path):
    """Reads the outcome of each test from a file that `keep` wrote."""
    found, outcome = {}, None
    with open(path) as file:
        for line in file:
            if line.startswith(" "):
                found[line.strip()] = outcome
            elif not line.startswith("#"):
                outcome = line.strip()
    return found


def judge(options, found):
    """Whether the outcomes of the tests are as expected."""
    if not options.hold_against:
        return "failed" not in found.values()
    expected = kept(options.hold_against)
    if options.tests:
        expected = {name: outcome for name, outcome in expected.items() if name in options.tests}
    well, only_here = True, []
    for name in sorted(expected.keys() | found.keys()):
        outcome, other = found.get(name, "absent"), expected.get(name, "absent")
        if outcome == "passed" and other != "absent":
            only_here += [name] if other != "passed" else []
        elif outcome != other:
            well = False
            print(f"{name}: {outcome}, and {other} in {options.hold_against}")
    print(f"  passed by this backend only: {', '.join(only_here) or 'none'}", flush=True)
    return well


if __name__ == "__main__":
    main()
