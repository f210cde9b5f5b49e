"""Works that C++ keeps after Python has dropped them, and how DDP uses such works."""

import gc
import threading
import time
import unittest
import weakref
from datetime import timedelta

import torch
import torch._dynamo  # DDP would import it in every rank
import torch.distributed as dist
from ranks import die, heard, run
from torch import nn
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

SEVERAL_BACKENDS = "cpu:collectives,cuda:gloo"
SHORT = timedelta(milliseconds=200)


def left_to_cpp(work):
    """Returns the C++ half of a work in a new Python object, after the old Python object is gone."""
    boxed, python = work.boxed(), weakref.ref(work)
    del work
    gc.collect()
    assert python() is None
    return Work.unbox(boxed)


def started(kind, tensor):
    if kind == "one call":
        return dist.all_reduce(tensor, async_op=True)
    if kind == "put back after it":
        return dist.all_reduce(tensor.t(), async_op=True)
    if kind == "several as one":
        return dist.group.WORLD.allreduce_coalesced(list(tensor))
    with dist._coalescing_manager(async_ops=True) as coalesced:
        for part in tensor:
            dist.all_reduce(part)
    return coalesced.works[0]


KINDS = ("one call", "put back after it", "several as one", "in a window")


def outlive_python(rank, size):
    for kind in KINDS:
        outlives_python(rank, size, kind)


def outlives_python(rank, size, kind):
    tensor = torch.arange(6.0).reshape(2, 3) + rank
    expected = size * torch.arange(6.0).reshape(2, 3) + sum(range(size))
    held = [started(kind, tensor)]
    work = left_to_cpp(held.pop())
    assert work.wait() and work.wait()
    assert torch.equal(tensor, expected)
    future = work.get_future()
    assert future.done()
    if kind != "in a window":  # which gives no tensors, here as with Gloo
        flat = torch.cat([part.reshape(-1) for part in future.value()])
        assert torch.equal(flat.sort().values, expected.reshape(-1).sort().values)


def ends_without_a_wait(rank, size):
    """Keeps only the future of a work, as DDP does for its buckets."""
    ended = threading.Event()
    tensor = torch.ones(3)
    held = [dist.all_reduce(tensor, async_op=True)]
    work = left_to_cpp(held.pop())
    future = work.get_future()
    del work
    future.then(lambda _: ended.set())
    assert ended.wait(50)
    assert torch.equal(tensor, torch.full((3,), float(size)))


def a_peer_dies(rank, size, kind):
    dist.barrier()
    if rank == 1:
        die()
    held = [started(kind, torch.ones(2, 3))]
    work = left_to_cpp(held.pop())
    return [heard(work.wait) for _ in range(2)]


def takes_too_long(rank, size):
    group = dist.new_group([0, 1], timeout=SHORT)
    outcomes = []
    if rank == 0:
        held = [dist.all_reduce(torch.ones(3), group=group, async_op=True)]
        outcomes.append(heard(left_to_cpp(held.pop()).wait))
        tensor = torch.ones(3)
        held = [dist.all_reduce(tensor, async_op=True)]
        work = left_to_cpp(held.pop())
        outcomes += [heard(lambda: work.wait(SHORT)) for _ in range(2)]
        dist.send(torch.ones(1), 1)
        assert work.wait()
        assert torch.equal(tensor, torch.full((3,), 2.0))
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(3))
    return outcomes


def keeps_nothing(rank, size):
    """A dropped work keeps no tensor alive, whether it succeeded or failed."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait()
    group = dist.new_group([0, 1], timeout=SHORT)
    failed = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(failed, group=group, async_op=True)
        heard(work.wait)
        heard(work.get_future().wait)
        del work
    dist.barrier()
    gone = [weakref.ref(tensor), weakref.ref(failed)]
    del tensor, failed
    deadline = time.monotonic() + 30  # the notification thread may still hold a reference
    while any(each() is not None for each in gone) and time.monotonic() < deadline:
        gc.collect()
    return [each() is None for each in gone]


def futures(rank, size):
    """A future that is requested after the end of its call has ended already."""
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    future = work.get_future()
    assert future.done() and future.value()[0] is tensor
    many = [dist.all_reduce(torch.ones(2), async_op=True).get_future() for _ in range(4)]
    assert all(torch.equal(result[0], torch.full((2,), float(size))) for result in torch.futures.wait_all(many))


def failed_futures(rank, size):
    dist.barrier()
    if rank == 1:
        die()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = work.get_future()
    outcomes = [heard(future.wait), heard(work.get_future().wait), heard(lambda: torch.futures.wait_all([future]))]
    outcomes.append(heard(future.then(lambda ended: ended.value()).wait))
    return outcomes


def inputs_of(rank):
    torch.manual_seed(40 + rank)
    return [torch.rand(3, 2) for _ in range(1 + 2 * rank)]


def model():
    torch.manual_seed(3)
    return nn.Linear(2, 3)


def join(rank, size):
    for by_initial_size in (True, False):
        joins(rank, size, by_initial_size)


def joins(rank, size, by_initial_size):
    """
    Trains DDP on uneven inputs, and compares it with its definition: each step sums the gradients of the ranks that
    still have inputs, and divides by the number of these ranks or of all ranks.
    """
    net, alike = DistributedDataParallel(model()), model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, alike)]
    everybodys = [inputs_of(other) for other in range(size)]
    mine = everybodys[rank]
    with net.join(divide_by_initial_world_size=by_initial_size):
        for step, input in enumerate(mine):
            optimizers[0].zero_grad()
            net(input).norm().backward()
            optimizers[0].step()
            there = [inputs[step] for inputs in everybodys if step < len(inputs)]
            optimizers[1].zero_grad()
            for other in there:
                (alike(other).norm() / (size if by_initial_size else len(there))).backward()
            optimizers[1].step()
            for parameter, expected in zip(net.parameters(), alike.parameters()):
                torch.testing.assert_close(parameter, expected)
    last = [parameter.detach().clone() for parameter in net.module.parameters()]
    for parameter in last:
        of_last = parameter.clone()
        dist.broadcast(of_last, size - 1)
        assert torch.equal(parameter, of_last)


def ends_early(rank, size):
    net = DistributedDataParallel(model())

    def steps(by_initial_size):
        with net.join(divide_by_initial_world_size=by_initial_size, throw_on_early_termination=True):
            for input in inputs_of(rank):
                net(input).norm().backward()

    return [heard(lambda: steps(by_initial_size)) for by_initial_size in (True, False)]


def dies_in_the_backward_pass(rank, size, hook):
    net = DistributedDataParallel(model())
    if hook:
        net.register_comm_hook(None, hook)
    for _ in range(3):
        net(torch.rand(3, 2)).norm().backward()
    loss = net(torch.rand(3, 2)).norm()
    dist.barrier()
    if rank == 1:
        die()
    return heard(loss.backward)


def averaging(_state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda ended: ended.value()[0].div_(dist.get_world_size()))


class Works(unittest.TestCase):
    def test_a_work_outlives_all_that_python_has_of_it(self):
        for size in (1, 3):
            run(size, outlive_python)

    def test_the_future_of_a_work_that_nobody_has_ends(self):
        run(2, ends_without_a_wait)

    def test_a_work_outlives_python_where_a_peer_dies(self):
        for kind in ("one call", "in a window"):
            with self.subTest(kind=kind):
                for name, words in run(2, a_peer_dies, kind, lost=[1])[0]:
                    self.assertEqual(name, "DistNetworkError", words)
                    self.assertIn("rank 1", words)

    def test_a_work_outlives_python_where_time_runs_out(self):
        call, *waits = run(2, takes_too_long)[0]
        self.assertEqual(call[0], "DistBackendError", call[1])
        self.assertIn("rank 1", call[1])
        for name, words in waits:
            self.assertEqual(name, "DistBackendError", words)
            self.assertIn("still running", words)

    def test_a_work_keeps_nothing_when_it_is_gone(self):
        self.assertEqual(run(2, keeps_nothing), [[True, True]] * 2)

    def test_futures_end_with_their_calls(self):
        for backend in ("collectives", SEVERAL_BACKENDS):
            run(2, futures, backend=backend)

    def test_an_error_is_one_of_the_future(self):
        for backend in ("collectives", SEVERAL_BACKENDS):
            for name, words in run(2, failed_futures, lost=[1], backend=backend)[0]:
                self.assertIsNotNone(name)
                self.assertIn("rank 1", words)


class DataParallel(unittest.TestCase):
    def test_uneven_inputs_are_joined(self):
        for size in (2, 3):
            run(size, join)
        run(2, join, backend=SEVERAL_BACKENDS)

    def test_uneven_inputs_are_told_to_all(self):
        for size in (2, 3):
            for outcomes in run(size, ends_early):
                for name, words in outcomes:
                    self.assertEqual(name, "RuntimeError")
                    self.assertIn("exhausted", words)

    def test_a_rank_that_dies_in_the_backward_pass_is_an_error(self):
        for backend in ("collectives", SEVERAL_BACKENDS):
            for hook in (None, averaging):
                with self.subTest(backend=backend, hook=hook):
                    name, words = run(2, dies_in_the_backward_pass, hook, backend=backend, lost=[1])[0]
                    self.assertIsNotNone(name)
                    self.assertIn("lost rank 1", words)


if __name__ == "__main__":
    unittest.main()
