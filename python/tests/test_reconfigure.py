"""`reconfigure`: the ranks of a group change, in PyTorch's experimental interface."""

import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import die, heard, run
from torch.nn.parallel import DistributedDataParallel


def exchanged(name, rank, size, store=None):
    """Returns the handles of ranks that meet in the default store."""
    store = dist.PrefixStore(name, store or dist.group.WORLD.get_group_store())
    store.set(str(rank), dist._get_reconfigure_handle())
    return [store.get(str(other)).decode() for other in range(size)]


def works(rank, size, trains=False):
    """Checks the group from Python, from the dispatcher's C++ code and, if the caller wants it, from DDP's."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    world = dist.group.WORLD
    assert (dist.ProcessGroup.rank(world), dist.ProcessGroup.size(world)) == (rank, size)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(1, size + 1))
    world._is_recorded = True  # which makes the call go through the dispatcher
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    world._is_recorded = False
    assert [part.item() for part in parts] == list(range(size))
    dist.monitored_barrier()
    if trains:
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(rank))).sum().backward()
        assert model.module.weight.grad.item() == sum(range(size)) / size


def connects_later(rank, size):
    store = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "collectives", store=dist.PrefixStore("later", store), rank=rank, world_size=size, enable_reconfigure=True
    )
    assert dist._supports_reconfigure()
    early = heard(lambda: dist.all_reduce(torch.ones(1)))
    handles = exchanged("first", rank, size)
    dist._reconfigure(1, handles).wait()
    works(rank, size)
    handles = exchanged("second", rank, size)
    dist._reconfigure(2, handles[::-1]).wait()
    works(size - 1 - rank, size, trains=size == 3)
    return early


def never_connects(rank, size):
    store = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "collectives", store=dist.PrefixStore("never", store), rank=rank, world_size=size, enable_reconfigure=True
    )
    dist.destroy_process_group()


def replaces_a_dead_rank(rank, size):
    """Rank 1 of the three first ranks dies. Rank 3, a new process, takes its place."""
    world = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    store = dist.PrefixStore("replaced", world)
    timeout = timedelta(seconds=50)
    if rank < 3:
        dist.init_process_group("collectives", store=store, rank=rank, world_size=3, timeout=timeout)
        works(rank, 3)
        dist.split_group(split_ranks=[[0, 1, 2]])
    else:
        dist.init_process_group("collectives", store=store, rank=1, world_size=3, timeout=timeout, enable_reconfigure=True)
    if rank == 1:
        die()
    failed = heard(lambda: dist.all_reduce(torch.ones(1)))
    place = {0: 0, 3: 1, 2: 2}[rank]
    handles = exchanged("replacing", place, 3, world)
    dist._reconfigure(5, set(handles), timeout=timedelta(seconds=20)).wait()
    works(place, 3)
    part = dist.group.WORLD.split_group([2, 0])
    if place != 1:
        tensor = torch.tensor([place + 1.0])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 4
    return failed[0]


def leave_and_return(rank, size):
    """Rank 0 is left out, and then belongs to the group again."""
    store = dist.group.WORLD.get_group_store()
    last = None
    if rank:
        dist._reconfigure(1, exchanged("fewer", rank - 1, size - 1)).wait()
        works(rank - 1, size - 1)
        store.set(f"done/{rank}", "1")
    else:
        # The other ranks end the connections that this call uses.
        last = heard(lambda: dist.all_reduce(torch.ones(1)))
        store.wait([f"done/{other}" for other in range(1, size)])
    dist._reconfigure(2, exchanged("all", rank, size, store)).wait()
    works(rank, size)
    return last


def wrong(rank, size):
    own, outcomes = dist._get_reconfigure_handle(), []
    other = own.replace(f":{rank}:", f":{1 - rank}:")
    for handles in ([], [other], [own, own], [own, "gloo:0:0:0"], [own, "collectives:x:1"], [own, "collectives:²:1"], [own, "c" * 10**6]):
        try:
            dist._reconfigure(9, handles)
        except ValueError as error:
            outcomes.append(str(error))
    works(rank, size)
    return outcomes


def a_rank_does_not_come(rank, size):
    handles = exchanged("late", rank, size)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.get("over")
        return None
    began = time.monotonic()
    late = heard(lambda: dist._reconfigure(3, handles, timeout=timedelta(seconds=1)))
    seconds = time.monotonic() - began
    after = heard(lambda: dist.all_reduce(torch.ones(1)))
    # The rank and the size are those that this call asked for, and a new number can still connect the ranks.
    dist._reconfigure(4, [dist._get_reconfigure_handle()]).wait()
    works(0, 1)
    store.set("over", "1")
    return late, seconds, after


class Reconfigures(unittest.TestCase):
    def test_a_group_connects_when_it_is_told_its_ranks(self):
        for size in (1, 2, 3):
            for kind, words in run(size, connects_later):
                self.assertEqual(kind, "DistBackendError")
                self.assertIn("call reconfigure", words)

    def test_a_group_that_never_connects_ends(self):
        run(2, never_connects)

    def test_a_new_process_takes_the_place_of_a_dead_one(self):
        outcomes = run(4, replaces_a_dead_rank, lost=[1])
        self.assertIn(outcomes[0], ("DistNetworkError", "DistBackendError"))
        self.assertEqual(outcomes[3], "DistBackendError")

    def test_ranks_leave_and_return(self):
        outcomes = run(3, leave_and_return)
        self.assertIsNotNone(outcomes[0][0])

    def test_wrong_handles_are_refused_and_change_nothing(self):
        for outcomes in run(2, wrong):
            self.assertEqual(len(outcomes), 7)
            for words in outcomes:
                self.assertRegex(words, "^reconfigure: ")
                self.assertLess(len(words), 400)

    def test_a_rank_that_does_not_come_is_named(self):
        (kind, words), seconds, after = run(2, a_rank_does_not_come)[0]
        self.assertEqual(kind, "DistBackendError")
        self.assertIn("rank 1", words)
        self.assertLess(seconds, 15)
        self.assertIn("call reconfigure", after[1])


if __name__ == "__main__":
    unittest.main()
