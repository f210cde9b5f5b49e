"""`shrink_group`: the ranks that remain continue without the others, which may be dead or alive."""

import re
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import die, heard, run
from torch.nn.parallel import DistributedDataParallel


def summed(group=None):
    """Returns the sum of the ranks' numbers, counted from 1, in this group."""
    tensor = torch.tensor([dist.get_rank(group) + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def total(size):
    return sum(range(1, size + 1))


def leaves_out(rank, size, excluded, flags):
    """The excluded ranks are alive, and do not call."""
    dist.barrier()
    if rank in excluded:
        return heard(lambda: dist.all_reduce(torch.ones(1)))
    group = dist.shrink_group(list(excluded), shrink_flags=flags)
    remaining = [other for other in range(size) if other not in excluded]
    assert group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (remaining.index(rank), len(remaining))
    assert dist.get_process_group_ranks(group) == remaining
    assert dist.get_backend(group) == "collectives"
    assert summed() == total(len(remaining))
    gathered = [None] * len(remaining)
    dist.all_gather_object(gathered, rank)
    assert gathered == remaining
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.is_completed()
    if size < 4:
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad.item() == sum(range(len(remaining))) / len(remaining)
    dist.barrier()
    return None, ""


def loses_a_rank(rank, size, flags):
    summed()
    if rank == 1:
        die()
    failed = heard(summed)
    began = time.monotonic()
    dist.shrink_group([1], shrink_flags=flags)
    return failed[0], time.monotonic() - began, summed(), dist.get_rank()


def shrinks_twice(rank, size):
    for last in (3, 2):
        if dist.get_rank() == last:
            return None
        dist.shrink_group([last])
        assert dist.get_world_size() == last
        assert summed() == total(last)
    return None


def shrinks_a_part(rank, size):
    """The default group continues, and so does the rank that the part has lost."""
    part = dist.new_group([0, 1, 2])
    if rank < 2:
        pair = dist.shrink_group([2], group=part)
        assert dist.get_process_group_ranks(pair) == [0, 1]
        assert (pair.rank(), pair.size()) == (rank, 2)
        assert summed(pair) == 3
        refused = heard(lambda: part.allreduce([torch.ones(1)]).wait())
        assert refused[0] is not None
    assert dist.get_world_size() == size
    assert summed() == total(size)
    return None


def shrinks_other_groups_away(rank, size):
    part = dist.new_group([0, 1])
    if rank == 2:
        return None
    dist.shrink_group([2])
    assert dist.get_world_size() == 2
    try:
        dist.all_reduce(torch.ones(1), group=part)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def wrong(rank, size):
    def refused(*arguments, **named):
        try:
            dist.shrink_group(*arguments, **named)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error).__name__
        return None

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    lists = ([], [size], [-1], [1 - rank, 1 - rank], list(range(size)), ["0"], (1,), [rank])
    outcomes = [refused(excluded) for excluded in lists]
    outcomes.append(refused([1 - rank], shrink_flags=7))
    for excluded in ([rank], [1 - rank, 1 - rank], [size], [-1]):
        try:
            backend.shrink(excluded)
        except ValueError as error:
            outcomes.append(str(error))
    assert summed() == total(size)
    return outcomes


def a_rank_does_not_come(rank, size):
    if rank == 2:
        dist.recv(torch.ones(1), 0)
        return None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    short = type(options)("collectives", timeout=timedelta(seconds=1))
    if rank == 1:
        return None
    began = time.monotonic()
    failed = heard(lambda: dist.shrink_group([1], pg_options=short))
    seconds = time.monotonic() - began
    dist.send(torch.ones(1), 2)  # the old group is intact
    return failed, seconds


def alone(rank, size):
    try:
        dist.shrink_group([0])
    except ValueError as error:
        return str(error)
    return None


class Shrinks(unittest.TestCase):
    def test_ranks_that_are_alive_are_left_out(self):
        for size, excluded, flags in ((2, [1], 0), (3, [0], 1), (4, [1, 2], 0), (4, [3, 0, 1], 1)):
            with self.subTest(size=size, excluded=excluded):
                for rank, (kind, words) in enumerate(run(size, leaves_out, excluded, flags)):
                    self.assertEqual(kind is not None, rank in excluded, words)

    def test_ranks_that_have_died_are_left_out(self):
        for flags in (0, 1):
            outcomes = run(4, loses_a_rank, flags, lost=[1])
            self.assertIsNone(outcomes.pop(1))
            for place, (failed, seconds, added, rank) in enumerate(outcomes):
                self.assertIn(failed, ("DistNetworkError", "DistBackendError"))
                self.assertLess(seconds, 20)
                self.assertEqual((added, rank), (6.0, place))

    def test_a_shrunk_group_shrinks_again(self):
        run(4, shrinks_twice)

    def test_a_part_shrinks(self):
        run(4, shrinks_a_part)

    def test_shrinking_the_default_group_ends_all_others(self):
        for words in run(3, shrinks_other_groups_away)[:2]:
            self.assertIsNotNone(words)

    def test_wrong_ranks_are_refused_and_change_nothing(self):
        for outcomes in run(2, wrong):
            expected = ["ValueError"] * 5 + ["TypeError"] * 2 + ["RuntimeError", "ValueError"]
            self.assertEqual(outcomes[: len(expected)], expected)
            self.assertEqual(len(outcomes), len(expected) + 4)
            for words in outcomes[len(expected) :]:
                self.assertRegex(words, "^shrink: ranks ")

    def test_a_rank_that_does_not_come_is_named(self):
        (kind, words), seconds = run(3, a_rank_does_not_come)[0]
        self.assertEqual(kind, "DistBackendError")
        self.assertTrue(re.search("missing.*rank 1", words), words)
        self.assertLess(seconds, 15)

    def test_a_group_of_one_rank_cannot_shrink(self):
        self.assertIn("size 1", run(1, alone)[0])


if __name__ == "__main__":
    unittest.main()
