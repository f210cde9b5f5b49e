"""Timeouts of calls, and how groups are split and ended."""

import re
import sys
import tempfile
import threading
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import heard, run
from torch._C._distributed_c10d import (
    AllToAllOptions,
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

SHORT = timedelta(milliseconds=300)


def with_options(group, kind, call, asynchronous, root=None):
    options = kind()
    options.timeout = SHORT
    options.asyncOp = asynchronous
    if root is not None:
        options.rootRank = root
    return heard(lambda: call(group, options).wait())


def one():
    return torch.ones(2)


def pair():
    return [torch.ones(2), torch.ones(2)]


# Calls that rank 0 of two cannot complete alone: the type of their options, their root, the call.
WITH_OPTIONS = [
    (AllreduceOptions, None, lambda group, options: group.allreduce([one()], options)),
    (AllreduceOptions, None, lambda group, options: group.allreduce([torch.ones(2).to_sparse()], options)),
    (BroadcastOptions, 1, lambda group, options: group.broadcast([one()], options)),
    (ReduceOptions, 0, lambda group, options: group.reduce([one()], options)),
    (AllgatherOptions, None, lambda group, options: group.allgather([pair()], [one()], options)),
    (AllgatherOptions, None, lambda group, options: group._allgather_base(torch.ones(4), one(), options)),
    (GatherOptions, 0, lambda group, options: group.gather([pair()], [one()], options)),
    (ScatterOptions, 1, lambda group, options: group.scatter([one()], [], options)),
    (ReduceScatterOptions, None, lambda group, options: group.reduce_scatter([one()], [pair()], options)),
    (ReduceScatterOptions, None, lambda group, options: group._reduce_scatter_base(one(), torch.ones(4), options)),
    (AllToAllOptions, None, lambda group, options: group.alltoall(pair(), pair(), options)),
    (AllToAllOptions, None, lambda group, options: group.alltoall_base(one(), one(), [1, 1], [1, 1], options)),
    (BarrierOptions, None, lambda group, options: group.barrier(options)),
]
# The same in PyTorch's other form, whose last argument is the timeout.
WITH_TIMEOUT = [
    lambda group: group.allreduce(one(), dist.ReduceOp.SUM, SHORT),
    lambda group: group.allreduce([one()], timeout=SHORT),
    lambda group: group.broadcast(one(), 1, SHORT),
    lambda group: group.reduce(one(), 0, dist.ReduceOp.SUM, timeout=SHORT),
    lambda group: group.allgather(pair(), one(), SHORT),
    lambda group: group.gather(pair(), one(), 0, SHORT),
    lambda group: group.scatter(one(), [], 1, SHORT),
    lambda group: group.reduce_scatter(one(), pair(), timeout=SHORT),
    lambda group: group.alltoall_base(one(), one(), [1, 1], [1, 1], SHORT),
    lambda group: group.barrier(SHORT),
    lambda group: group.barrier(timeout=SHORT),
]


def groups(count):
    return [dist.new_group([0, 1]) for _ in range(count)]


def calls_that_take_too_long(rank, size):
    outcomes = []
    for asynchronous in (False, True):
        for (kind, root, call), group in zip(WITH_OPTIONS, groups(len(WITH_OPTIONS))):
            outcomes += [with_options(group, kind, call, asynchronous, root)] if rank == 0 else []
    for call, group in zip(WITH_TIMEOUT, groups(len(WITH_TIMEOUT))):
        outcomes += [heard(lambda call=call, group=group: call(group).wait())] if rank == 0 else []
    dist.barrier()
    return outcomes


def the_form_with_a_timeout(rank, size):
    """The form with a timeout gives the same results as the form with options."""
    world, long = dist.group.WORLD, timedelta(seconds=50)
    mine = torch.full((2,), float(rank))
    total = torch.full((2,), float(sum(range(size))))
    of_all = [torch.full((2,), float(other)) for other in range(size)]
    room = mine.clone()
    world.allreduce(room, dist.ReduceOp.SUM, long).wait()
    assert torch.equal(room, total)
    room = mine.clone()
    world.allreduce([room], dist.ReduceOp.MAX, long).wait()
    assert torch.equal(room, torch.full((2,), float(size - 1)))
    room = mine.clone()
    world.broadcast(room, root=size - 1, timeout=long).wait()
    assert torch.equal(room, of_all[-1])
    parts = [torch.empty(2) for _ in range(size)]
    world.allgather(parts, mine, long).wait()
    assert all(map(torch.equal, parts, of_all))
    room = torch.empty(2)
    world.scatter(room, of_all if rank == 0 else [], 0, long).wait()
    assert torch.equal(room, mine)
    room = torch.empty(2)
    world.reduce_scatter(room, [torch.full((2,), float(rank + other)) for other in range(size)], timeout=long).wait()
    assert torch.equal(room, total + size * rank)
    room = torch.empty((size, 2))
    world.alltoall_base(room, mine.repeat(size, 1), [], [], long).wait()
    assert torch.equal(room, torch.stack(of_all))
    world.barrier(long).wait()


def waits_for_messages(rank, size):
    """PyTorch passes no timeout with a message, so the timeout of the group or of the wait applies."""
    group = dist.new_group([0, 1])
    dist.set_timeout(SHORT, group)
    outcomes = []
    if rank == 0:
        waited = dist.irecv(torch.zeros(1), 1, tag=3)
        outcomes = [heard(lambda: waited.wait(SHORT)), heard(lambda: dist.recv(torch.zeros(1), 1, group=group))]
        dist.barrier()
        waited.wait()
    else:
        dist.barrier()
        dist.send(torch.ones(1), 0, tag=3)
    return outcomes


def aborts(rank, size):
    others = dist.new_group(list(range(size)))
    group = dist.new_group(list(range(size)))
    dist.all_reduce(one(), group=group)
    outcome = None
    if rank == 0:
        work = dist.all_reduce(one(), group=group, async_op=True)
        group.abort()
        group.abort()
        outcome = heard(work.wait)
    dist.barrier()
    if rank != 0:
        tensor = one()
        outcome = heard(lambda: dist.all_reduce(tensor, group=group))
        # Rank 0 may have given its part before it aborted.
        if outcome[0] is None and tensor[0].item() == size:
            outcome = heard(lambda: dist.all_reduce(one(), group=group))
    after = heard(lambda: dist.all_reduce(one(), group=group))
    tensor = one()
    dist.all_reduce(tensor, group=others)
    assert tensor[0].item() == size
    return outcome, after


def aborts_all(rank, size, folder):
    dist.new_group(list(range(size)))
    work = None
    if rank == 0:
        work = dist.all_reduce(one(), async_op=True)
    dist.distributed_c10d._abort_process_group()
    outcome = heard(work.wait) if rank == 0 else None
    assert not dist.is_initialized()
    dist.init_process_group("collectives", init_method=f"file://{folder}/again", rank=rank, world_size=size)
    tensor = one()
    dist.all_reduce(tensor)
    assert tensor[0].item() == size
    return outcome


def shuts_down(rank, size):
    group = dist.new_group(list(range(size)))
    dist.all_reduce(one(), group=group)
    if rank == 0:
        group.shutdown()
        group.shutdown()
    outcome = heard(lambda: dist.all_reduce(one(), group=group))
    tensor = one()
    dist.all_reduce(tensor)
    assert tensor[0].item() == size
    return outcome


def shuts_down_beside_calls(rank, size, kind):
    """Shuts down beside a call whose peer never comes: a started one, one that a thread waits in, or a message."""
    group, outcome, ended = dist.new_group([0, 1]), [], threading.Event()
    dist.barrier()
    seconds = None
    if rank == 0:
        tensor, work = one(), None
        if kind == "thread":
            options = AllreduceOptions()
            options.asyncOp = False

            def wait():
                outcome.append(heard(lambda: group.allreduce([tensor], options)))
                ended.set()

            thread = threading.Thread(target=wait)
            thread.start()
            while (frame := sys._current_frames().get(thread.ident)) is None or frame.f_code.co_name != "_call":
                pass  # until the thread is about to make the call
        else:
            work = dist.all_reduce(tensor, group=group, async_op=True) if kind == "started" else dist.irecv(tensor, 1, group=group)
        began = time.monotonic()
        dist.destroy_process_group(group)
        seconds = time.monotonic() - began
        if work is not None:
            outcome.append(heard(work.wait))
            ended.set()
        assert ended.wait(50)
    dist.barrier()
    return seconds, outcome


def ends_what_can_end(rank, size):
    """Calls that all ranks have made end without an error before their group is destroyed."""
    for _ in range(20):
        group = dist.new_group([0, 1])
        works = [dist.all_reduce(one(), group=group, async_op=True) for _ in range(5)]
        [work.wait() for work in works]
        dist.destroy_process_group(group)


def for_cuda_tensors(rank, size):
    """CPU tensors go to the backend that the program named, although this one could serve them."""
    world = dist.group.WORLD
    assert type(world) is dist.ProcessGroup
    assert type(world._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
    assert world._get_backend(torch.device("cuda")).getBackendName() == "collectives"
    tensor = one()
    dist.all_reduce(tensor)
    assert tensor[0].item() == size
    part = dist.new_group([0, 1])
    assert type(part._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo


def for_cuda_tensors_alone(rank, size):
    return heard(lambda: dist.all_reduce(one()))


def splits(rank, size):
    world = torch.ones(3) * (rank + 1)
    for _ in range(2):  # each split makes new groups
        part = dist.split_group(split_ranks=[list(range(size - 1)), [size - 1]], timeout=timedelta(seconds=50))
        members = list(range(size - 1)) if rank < size - 1 else [rank]
        assert dist.get_process_group_ranks(part) == members
        assert (part.rank(), part.size()) == (members.index(rank), len(members))
        tensor = world.clone()
        dist.all_reduce(tensor, group=part)
        assert torch.equal(tensor, torch.full((3,), float(sum(member + 1 for member in members))))
        work = dist.all_reduce(tensor, group=part, async_op=True)
        work.wait()
        assert torch.equal(tensor, torch.full((3,), float(len(members) * sum(member + 1 for member in members))))
        gathered = [None] * len(members)
        dist.all_gather_object(gathered, rank, group=part)
        assert gathered == members
    turned = dist.split_group(split_ranks=[list(reversed(range(size)))])
    assert (turned.rank(), dist.get_group_rank(turned, rank)) == (size - 1 - rank, size - 1 - rank)
    room = world.clone()
    dist.broadcast(room, 0, group=turned)
    assert torch.equal(room, torch.ones(3))
    alone = dist.group.WORLD.split_group([rank])
    dist.all_reduce(room, group=alone)
    assert torch.equal(room, torch.ones(3))
    # Ranks that are in no part. A split by fewer ranks comes last, because PyTorch names groups by counting splits.
    pair = dist.split_group(split_ranks=[[0, 1]])
    if rank > 1:
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
    else:
        again = dist.split_group(parent_pg=pair, split_ranks=[[1, 0]])
        tensor = world.clone()
        dist.all_reduce(tensor, group=again)
        assert torch.equal(tensor, torch.full((3,), 3.0))
    dist.all_reduce(world)
    assert world[0].item() == sum(range(1, size + 1))


def groups_of_one(rank, size):
    """Each rank makes a group of itself alone. PyTorch gives all of them the same name."""
    pair = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    alone, _ = dist.new_subgroups(group_size=1, group=pair)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=alone)
    assert torch.equal(tensor, torch.ones(3))
    dist.all_reduce(tensor, group=pair)
    assert torch.equal(tensor, torch.full((3,), 2.0))


def splits_of_several_backends(rank, size):
    """In a group of several backends, PyTorch's own code asks each backend for its part."""
    for _ in range(2):
        part = dist.split_group(split_ranks=[[1, 0], [2]])
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor, group=part)
        assert torch.equal(tensor, torch.full((3,), 3.0))
        dist.broadcast(tensor.fill_(float(rank)), 2 if rank == 2 else 0, group=part)
        assert torch.equal(tensor, torch.full((3,), 2.0 if rank == 2 else 0.0))
    refused = heard(lambda: dist.split_group(split_ranks=[[0, 1]]))
    dist.barrier()
    return refused


class Groups(unittest.TestCase):
    def test_each_call_has_a_timeout_of_its_own(self):
        outcomes = run(2, calls_that_take_too_long, seconds=50)[0]
        self.assertEqual(len(outcomes), 2 * len(WITH_OPTIONS) + len(WITH_TIMEOUT))
        for at, (kind, words) in enumerate(outcomes):
            with self.subTest(call=at):
                self.assertIn(kind, ("DistBackendError", "RuntimeError"))
                self.assertIn("rank 1", words)
                after = float(re.search(r"after ([0-9.]+) s", words)[1])
                self.assertTrue(0.3 <= after < 25, words)  # the group's timeout is 50 s

    def test_the_form_with_a_timeout_gives_the_same(self):
        for size in (1, 2, 3):
            run(size, the_form_with_a_timeout)

    def test_messages_have_the_groups_timeout_or_the_waits(self):
        waited, received = run(2, waits_for_messages)[0]
        self.assertEqual(waited[0], "DistBackendError")
        self.assertIn("still running", waited[1])
        self.assertEqual(received[0], "DistBackendError")
        self.assertIn("rank 1", received[1])

    def test_an_abort_ends_the_calls_of_all_ranks_in_that_group_alone(self):
        for (kind, words), (after, _) in run(3, aborts):
            self.assertEqual(kind, "DistBackendError", words)
            self.assertIn("abort", words)
            self.assertEqual(after, "DistBackendError")

    def test_all_groups_may_be_aborted_and_made_anew(self):
        with tempfile.TemporaryDirectory() as folder:
            kind, words = run(2, aborts_all, folder)[0]
        self.assertEqual(kind, "DistBackendError", words)

    def test_a_shutdown_is_heard_by_who_waits_for_the_rank(self):
        for rank, (kind, words) in enumerate(run(3, shuts_down)):
            self.assertIn(kind, ("DistBackendError", "DistNetworkError"))
            self.assertTrue(rank == 0 or "rank 0" in words, words)

    def test_a_shutdown_waits_for_no_call(self):
        for kind in ("started", "thread", "message"):
            with self.subTest(kind=kind):
                seconds, outcomes = run(2, shuts_down_beside_calls, kind)[0]
                self.assertLess(seconds, 3)
                for error, words in outcomes:
                    self.assertEqual(error, "DistBackendError", words)
                    self.assertTrue("abort" in words or "closed" in words, words)

    def test_a_shutdown_leaves_calls_that_have_ended_alone(self):
        run(2, ends_what_can_end)

    def test_each_kind_of_device_has_the_backend_that_was_named(self):
        for backend in ("cpu:gloo,cuda:collectives", "cuda:collectives,cpu:gloo"):
            run(2, for_cuda_tensors, backend=backend)
        for kind, words in run(2, for_cuda_tensors_alone, backend="cuda:collectives"):
            self.assertEqual(kind, "RuntimeError")
            self.assertIn("cpu", words)

    def test_a_group_is_split(self):
        for size in (2, 3, 4):
            run(size, splits)

    def test_groups_of_one_rank_do_not_meet(self):
        run(4, groups_of_one)

    def test_a_group_of_several_backends_is_split(self):
        refused = run(3, splits_of_several_backends, backend="cpu:collectives,cuda:gloo")
        self.assertEqual([kind for kind, _ in refused], [None, None, "RuntimeError"])
        self.assertIn("rank 2 is in none of the new groups", refused[2][1])


if __name__ == "__main__":
    unittest.main()
