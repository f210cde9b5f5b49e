"""Ctrl-C while a call waits for a peer."""

import os
import pathlib
import signal
import threading
import time
import unittest

import torch
import torch.distributed as dist
from ranks import run

CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "barrier": dist.barrier,
    "sparse": lambda: dist.all_reduce(torch.ones(4).to_sparse()),
    "recv": lambda: dist.recv(torch.ones(4), 1),
    "wait": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
}


def outcome(call):
    try:
        call()
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "ended", ""


def interrupt_when_it_waits(store):
    """Sends SIGINT to rank 0 once its main thread sleeps. It has nothing to sleep for except the call."""
    process = store.get("waits").decode()
    state, looks, deadline = pathlib.Path(f"/proc/{process}/stat"), 0, time.monotonic() + 30
    while looks < 3 and time.monotonic() < deadline:
        looks = looks + 1 if state.read_text().rsplit(")", 1)[1].split()[0] == "S" else 0
        os.sched_yield()
    os.kill(int(process), signal.SIGINT)


def interrupted(rank, size, how):
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        interrupt_when_it_waits(store)
        store.wait(["stopped"])
        if how in ("recv", "wait"):  # it goes on
            dist.send(torch.full((4,), 7.0), 0) if how == "recv" else dist.all_reduce(torch.ones(4))
        else:
            # Rank 0 may have given its part of this call. Then the call still ends well.
            first = outcome(CALLS[how])
            return first if first[1] else outcome(dist.barrier)
        return outcome(dist.barrier)
    store.set("waits", str(os.getpid()))
    heard = outcome(CALLS[how])
    store.set("stopped", "")
    return heard, outcome(dist.barrier)


def interrupted_with_a_handler(rank, size):
    store, heard = dist.group.WORLD.get_group_store(), []
    if rank == 1:
        interrupt_when_it_waits(store)
        dist.all_reduce(torch.ones(4))
        return outcome(dist.barrier)
    signal.signal(signal.SIGINT, lambda *_: heard.append("heard"))
    store.set("waits", str(os.getpid()))
    dist.all_reduce(torch.ones(4))
    return outcome(dist.barrier), heard


def interrupted_beside_a_thread(rank, size):
    """The call runs on another thread than the main one, which alone is interrupted."""
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        interrupt_when_it_waits(store)
        store.wait(["stopped"])
        return outcome(lambda: dist.all_reduce(torch.ones(4)))
    heard = []
    thread = threading.Thread(target=lambda: heard.append(outcome(lambda: dist.all_reduce(torch.ones(4)))))
    thread.start()
    store.set("waits", str(os.getpid()))
    main = outcome(thread.join)
    store.set("stopped", "")
    thread.join()
    return main, heard


def in_a_forked_child(rank, size):
    """A signal of a child is none of its parent."""
    dist.barrier()
    if rank == 0:
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                os._exit(1)
            except KeyboardInterrupt:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    return outcome(dist.barrier)


class Interrupts(unittest.TestCase):
    def test_a_call_that_blocks_ends_and_so_does_its_group(self):
        for how in ("all_reduce", "barrier", "sparse"):
            with self.subTest(how=how):
                (heard, later), peer = run(2, interrupted, how)
                self.assertEqual(heard[0], "KeyboardInterrupt", heard)
                for error in (later, peer):  # not of a timeout, which would end the call too
                    self.assertIn("aborted by rank 0", error[1])

    def test_a_wait_ends_and_its_call_goes_on(self):
        for how in ("recv", "wait"):
            with self.subTest(how=how):
                (heard, later), barrier = run(2, interrupted, how)
                self.assertEqual(heard[0], "KeyboardInterrupt", heard)
                self.assertEqual((later[0], barrier[0]), ("ended", "ended"))

    def test_a_handler_of_the_program_runs_when_the_call_has_ended(self):
        (later, heard), peer = run(2, interrupted_with_a_handler)
        self.assertEqual((later[0], peer[0], heard), ("ended", "ended", ["heard"]))

    def test_calls_of_other_threads_go_on(self):
        (main, (thread,)), peer = run(2, interrupted_beside_a_thread)
        self.assertEqual((main[0], thread[0], peer[0]), ("KeyboardInterrupt", "ended", "ended"))

    def test_a_child_that_is_interrupted_ends_no_group_of_its_parent(self):
        self.assertEqual([kind for kind, _ in run(2, in_a_forked_child)], ["ended", "ended"])


if __name__ == "__main__":
    unittest.main()
