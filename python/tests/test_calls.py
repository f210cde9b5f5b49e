"""Calls on tensors of every type, shape and layout."""

import itertools
import threading
import unittest

import torch
import torch.distributed as dist
from ranks import run
from torch._subclasses.fake_tensor import FakeTensorMode

FOLDED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (70_001,)]


def of_rank(rank, shape, dtype):
    """Returns small numbers, whose sums fit every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 11).reshape(shape).to(dtype)


def folds(rank, size):
    for dtype in FOLDED:
        for shape in SHAPES:
            mine = [of_rank(other, shape, dtype) for other in range(size)]
            tensor = mine[rank].clone()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, sum(mine[1:], mine[0].clone())), (dtype, shape)
            tensor = mine[rank].clone()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).wait()
            assert torch.equal(tensor, torch.stack(mine).amax(0)), (dtype, shape)


def moves(rank, size):
    for dtype in [*FOLDED, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]:
        for shape in SHAPES:
            mine = [of_rank(other, shape, dtype) for other in range(size)]
            as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in mine]
            gathered = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, mine[rank])
            same = lambda tensor, other: torch.equal(tensor.reshape(-1).view(torch.uint8), as_bytes[other])
            assert all(same(tensor, other) for other, tensor in enumerate(gathered)), (dtype, shape)
            tensor = mine[rank].clone()
            dist.broadcast(tensor, size - 1)
            assert same(tensor, size - 1), (dtype, shape)


def layouts(rank, size):
    whole = torch.arange(24.0).reshape(4, 6) + rank
    view = whole.clone().t()[1::2]
    assert not view.is_contiguous()
    for asynchronous in (False, True):
        strided = whole.clone().t()[1::2]
        work = dist.all_reduce(strided, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert torch.equal(strided, sum((torch.arange(24.0).reshape(4, 6) + other).t()[1::2] for other in range(size)))
    # This rank's part at its own place, and at another rank's.
    for place in (rank, (rank + 1) % size):
        room = torch.full((size, 3), -1.0)
        room[place] = rank
        dist.all_gather_into_tensor(room, room[place])
        assert torch.equal(room, torch.arange(float(size)).reshape(-1, 1).expand(size, 3)), room
    room = torch.arange(2.0 * size) + rank
    dist.reduce_scatter_tensor(room[:2], room)
    base = size * torch.arange(2.0 * size) + sum(range(size))
    assert torch.equal(room[:2], base[2 * rank : 2 * rank + 2])
    scattered = torch.zeros(2, 2).t()
    dist.scatter(scattered, [torch.full((2, 2), float(other)) for other in range(size)] if rank == 0 else None, 0)
    assert torch.equal(scattered, torch.full((2, 2), float(rank)))


def arranged(tensor, how):
    """Returns the same elements: contiguous, or as a transposed view, every second row, or part of a larger tensor."""
    if how == "transposed":
        return tensor.t().contiguous().t()
    if how == "spread":
        room = torch.zeros((2 * tensor.size(0), *tensor.shape[1:]), dtype=tensor.dtype)
        room[::2] = tensor
        return room[::2]
    if how == "within":
        room = torch.zeros((tensor.size(0) + 2, *tensor.shape[1:]), dtype=tensor.dtype)
        room[1:-1] = tensor
        return room[1:-1]
    return tensor.clone()


ARRANGEMENTS = ("contiguous", "transposed", "spread", "within")


def ended(work):
    if work is not None:
        work.wait()


def rows_between(source, target, dtype, count, width):
    """Returns the rows that one rank sends another, with values that depend on the pair."""
    return ((torch.arange(count * width) + 5 * source + 3 * target) % 100).reshape(count, width).to(dtype)


def everyone_to_everyone(rank, size):
    plans = {"uneven": lambda source, target: (2 * source + target) % 4, "even": lambda *_: 3, "nothing": lambda *_: 0, "to one": lambda _, target: 5 * (target == 0)}
    for name, count in plans.items():
        for dtype, width, how in itertools.product((torch.bool, torch.complex64), (0, 3), ARRANGEMENTS):
            sent, received = [count(rank, other) for other in range(size)], [count(other, rank) for other in range(size)]
            inputs = [rows_between(rank, other, dtype, sent[other], width) for other in range(size)]
            expected = [rows_between(other, rank, dtype, received[other], width) for other in range(size)]
            case = (name, dtype, width, how)
            asynchronous = how in ("transposed", "within")
            room = arranged(torch.zeros((sum(received), width), dtype=dtype), how)
            ended(dist.all_to_all_single(room, arranged(torch.cat(inputs), how), received, sent, async_op=asynchronous))
            assert torch.equal(room, torch.cat(expected)), case
            if name == "even":
                room = arranged(torch.zeros((sum(received), width), dtype=dtype), how)
                dist.all_to_all_single(room, arranged(torch.cat(inputs), how))
                assert torch.equal(room, torch.cat(expected)), case
            outputs = [arranged(torch.zeros_like(tensor), how) for tensor in expected]
            ended(dist.all_to_all(outputs, [arranged(tensor, how) for tensor in inputs], async_op=asynchronous))
            assert all(map(torch.equal, outputs, expected)), case


def folded_parts(rank, size):
    """Reduce-scatters, whose parts are joined or stacked, and gathers into one tensor."""
    for dtype, rows, width, how in itertools.product((torch.int32, torch.bfloat16), (0, 1, 4), (0, 2), ARRANGEMENTS):
        of_all = [torch.cat([rows_between(source, target, dtype, rows, width) % 11 for target in range(size)]) for source in range(size)]
        total = sum(of_all[1:], of_all[0].clone())[rank * rows : (rank + 1) * rows]
        highest = torch.stack(of_all).amax(0)[rank * rows : (rank + 1) * rows] if total.numel() else total
        case, asynchronous = (dtype, rows, width, how), how in ("transposed", "within")
        mine = arranged(of_all[rank], how)
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, highest)):
            room = arranged(torch.zeros((rows, width), dtype=dtype), how)
            ended(dist.reduce_scatter_tensor(room, mine, op, async_op=asynchronous))
            assert torch.equal(room, expected), case
            room = arranged(torch.zeros((rows, width), dtype=dtype), how)
            ended(dist.reduce_scatter(room, list(mine.split(rows)) if rows else [mine] * size, op, async_op=asynchronous))
            assert torch.equal(room, expected), case
        room = torch.zeros((rows, width), dtype=dtype)
        dist.reduce_scatter_tensor(room, mine.reshape(size, rows, width))
        assert torch.equal(room, total), case
        root = size - 1
        part, room = of_all[rank][:rows], arranged(torch.zeros((size * rows, width), dtype=dtype), how)
        ended(dist.gather_single(arranged(part, how), room if rank == root else None, root, async_op=asynchronous))
        assert rank != root or torch.equal(room, torch.cat([other[:rows] for other in of_all])), case


def complex_and_sparse(rank, size):
    tensor = torch.tensor([1 + 2j, rank * 1j], dtype=torch.complex64)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.tensor([size * (1 + 2j), sum(range(size)) * 1j], dtype=torch.complex64))
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.ones(2, 3), (size, 3))
    dense = sum(torch.sparse_coo_tensor(torch.tensor([[0, other]]), torch.ones(2, 3), (size, 3)).to_dense() for other in range(size))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), dense)
    empty = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), torch.empty(0), (4,))
    dist.all_reduce(empty)
    assert torch.equal(empty.to_dense(), torch.zeros(4))


def messages(rank, size):
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            tensor = torch.zeros(2)
            source = dist.recv(tensor, tag=7)
            assert torch.equal(tensor, torch.full((2,), float(source)))
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=7)
    right, left = (rank + 1) % size, (rank - 1) % size
    room = torch.zeros(3)
    exchange = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), right), dist.P2POp(dist.irecv, room, left)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert torch.equal(room, torch.full((3,), float(left)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]


def in_flight(rank, size):
    tensors = [torch.full((64,), float(number + rank)) for number in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    before = threading.active_count()
    futures = [work.get_future() for work in works[::3]]
    assert threading.active_count() <= before + 2, "futures need no thread each"
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((64,), float(number * size + sum(range(size)))))
    values = [future.then(lambda ended: ended.value()[0][0].item()).wait() for future in futures]
    assert values == [float(number * size + sum(range(size))) for number in range(0, 1000, 3)]
    # The program keeps neither the tensors nor the works.
    for _ in range(100):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.barrier()


def callbacks_that_wait(rank, size):
    def again(ended, depth):
        ended.value()
        tensor = torch.ones(3)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        if depth:
            future = future.then(lambda other: again(other, depth - 1))
        future.wait()
        return tensor

    for depth in (0, 1, 3):
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        assert torch.equal(future.then(lambda ended, depth=depth: again(ended, depth)).wait(), torch.full((3,), float(size)))


def ends_that_are_seen(rank, size):
    """A program that sees the end of a call also sees the result, even if it must be copied to its place."""
    for how in ("wait", "poll", "future and wait"):
        for _ in range(4):
            tensor = torch.ones(500, 700).t()
            work = dist.all_reduce(tensor, async_op=True)
            if how == "poll":
                while not work.is_completed():
                    pass
            else:
                if how == "future and wait":
                    work.get_future()
                work.wait()
            assert torch.equal(tensor, torch.full((700, 500), float(size))), how
    work = dist.all_reduce(held := torch.ones(1000), async_op=True)
    held.data = torch.zeros(1)
    work.wait()
    negative = torch._neg_view(torch.ones(2))
    gathered = torch.zeros(size, 2)
    dist.all_gather_into_tensor(gathered, negative)
    assert torch.equal(gathered, -torch.ones(size, 2))


def groups_on_threads(rank, size):
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    failed = []

    def program(group, number):
        try:
            for step in range(50):
                tensor = torch.full((100,), float(step + number))
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, torch.full((100,), size * float(step + number)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(group, number)) for number, group in enumerate(groups)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed
    alone = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=alone)
    assert torch.equal(tensor, torch.ones(3))


def refusals(rank, size):
    for call, kind in (
        (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), RuntimeError),
        (lambda: dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2)), ValueError),
        (lambda: dist.all_gather_into_tensor(torch.ones(size + 1), torch.ones(1)), ValueError),
        (lambda: dist.reduce_scatter_tensor(torch.ones(1, dtype=torch.int64), torch.ones(size)), ValueError),
        (lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), [1] * (size + 1), [1] * size), (ValueError, RuntimeError)),
        (lambda: dist.all_reduce(torch.empty(3, device="meta")), RuntimeError),
    ):
        try:
            call()
        except kind:
            continue
        raise AssertionError("not refused")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def kinds_that_are_more_than_elements():
    """Yields tensors that are more than their elements, each with a word of the error."""
    quantized = [torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype) for dtype in (torch.quint8, torch.qint8, torch.qint32)]
    by_channel = torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.zeros(2), 0, torch.quint8)
    yield from ((tensor, "quantized") for tensor in (*quantized, by_channel))
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]), "nested"
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged), "jagged"
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc(), torch.eye(2).to_sparse_bsr((1, 1))):
        yield sparse, "sparse"
    without = torch.ones(4)
    without.untyped_storage().resize_(0)
    yield without, "no memory"


def with_tensor(tensor, rank, size):
    """Yields every operation, with the tensor in each place that takes one."""
    plain, root = torch.ones(4), rank == 0
    many, plenty = [tensor] * size, [plain] * size
    yield lambda: dist.broadcast(tensor, 0)
    yield lambda: dist.reduce(tensor, 0)
    yield lambda: dist.gather(tensor, plenty if root else None, 0)
    yield lambda: dist.scatter(tensor, plenty if root else None, 0)
    for outputs, input in ((many, tensor), (plenty, tensor), (many, plain)):
        yield lambda outputs=outputs, input=input: dist.all_gather(outputs, input)
        yield lambda outputs=outputs, input=input: dist.reduce_scatter(input, outputs)
    for outputs, inputs in ((many, many), (plenty, many), (many, plenty)):
        yield lambda outputs=outputs, inputs=inputs: dist.all_to_all(outputs, inputs)
    for output, input in ((tensor, tensor), (torch.ones(4 * size), tensor), (tensor, torch.ones(4 * size))):
        yield lambda output=output, input=input: dist.all_gather_into_tensor(output, input)
        yield lambda output=output, input=input: dist.reduce_scatter_tensor(output, input)
        yield lambda output=output, input=input: dist.all_to_all_single(output, input)
    yield lambda: dist.send(tensor, (rank + 1) % size)
    yield lambda: dist.recv(tensor, (rank + 1) % size)
    if tensor.layout != torch.sparse_coo:
        yield lambda: dist.all_reduce(tensor)


def refuses_what_is_more_than_elements(rank, size):
    """Tensors are refused before anything is sent, so the group can still be used."""
    for tensor, word in kinds_that_are_more_than_elements():
        for at, call in enumerate(with_tensor(tensor, rank, size)):
            try:
                call()
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                continue
            raise AssertionError(f"{word}, call {at}: not refused")
        try:
            dist.broadcast(tensor, 0)
        except RuntimeError as error:
            assert word in str(error), error
    total = torch.ones(3)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((3,), float(size)))


def negative_views(rank, size):
    """The sign from a view's negative bit is sent too. PyTorch itself refuses conjugate views."""
    view, of_all = torch._neg_view(torch.full((3,), rank + 1.0)), [torch.full((3,), -(other + 1.0)) for other in range(size)]
    gathered, parts, part = torch.zeros(size, 3), [torch.zeros(3) for _ in range(size)], torch.zeros(3)
    dist.all_gather_into_tensor(gathered, view)
    dist.all_gather(parts, view)
    dist.reduce_scatter(part, [view] * size)
    assert torch.equal(gathered, torch.stack(of_all)) and all(map(torch.equal, parts, of_all)) and torch.equal(part, sum(of_all))
    dist.all_reduce(view)
    assert torch.equal(view, sum(of_all))


def in_inference_mode(rank, size):
    """Calls on tensors that were made in inference mode may be waited for outside it."""
    with torch.inference_mode():
        rows, outputs = torch.ones(3, 2), [torch.zeros(2) for _ in range(size)]
        works = [dist.all_reduce(rows[:, 0], async_op=True), dist.all_gather(outputs, torch.ones(2), async_op=True)]
        scattered = torch.zeros(2, 2).t()
        works.append(dist.scatter(scattered, [torch.ones(2, 2)] * size if rank == 0 else None, 0, async_op=True))
    for work in works:
        work.wait()
    assert torch.equal(rows, torch.tensor([[float(size), 1.0]] * 3))
    assert all(torch.equal(output, torch.ones(2)) for output in outputs) and torch.equal(scattered, torch.ones(2, 2))
    dist.all_reduce(rows[:, 1])
    future = dist.all_reduce(rows.t(), async_op=True).get_future()
    future.wait()
    assert torch.equal(rows, torch.full((3, 2), float(size * size)))
    plain = torch.ones(3, 2)
    with torch.inference_mode():
        dist.all_reduce(plain[:, 0])
    assert torch.equal(plain, torch.tensor([[float(size), 1.0]] * 3))


def uneven_parts(rank, size):
    for dtype in (torch.float32, torch.int64, torch.complex64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[: 1 if dtype.is_complex else 2]:
            for asynchronous in (False, True):
                inputs = [((torch.arange(6 * part) + rank) % 5).reshape(2 * part, 3).to(dtype).t().contiguous().t() for part in range(size)]
                of_all = torch.stack([((torch.arange(6 * rank) + other) % 5).reshape(2 * rank, 3).to(dtype) for other in range(size)])
                output = torch.zeros(2 * rank, 3, dtype=dtype)
                ended(dist.reduce_scatter(output, inputs, op=op, async_op=asynchronous))
                assert torch.equal(output, of_all.sum(0).to(dtype) if op == dist.ReduceOp.SUM else of_all.amax(0)), (dtype, op)


def fake_tensors(rank, size):
    """Calls on tensors that have only a shape move nothing, as with Gloo."""
    with FakeTensorMode():
        tensor, parts = torch.ones(4), [torch.ones(4) for _ in range(size)]
        whole, root = torch.ones(4 * size), rank == 0
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather(parts, tensor)
        dist.all_gather_into_tensor(whole, tensor)
        dist.reduce_scatter(tensor, parts)
        dist.reduce_scatter_tensor(tensor, whole)
        dist.all_to_all(parts, parts)
        dist.all_to_all_single(whole, whole)
        dist.gather(tensor, parts if root else None)
        dist.scatter(tensor, parts if root else None)
        dist.barrier()
        assert tensor.shape == (4,) and whole.shape == (4 * size,)
    dist.all_reduce(tensor)  # outside of the mode too


def tensors_of_one_element(rank, size):
    """Elements that share one place in memory may be read, but not written."""
    def spread(value):
        return torch.full((1,), float(value)).expand(4)

    tensor = spread(7) if rank == 0 else torch.zeros(4)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.full((4,), 7.0))
    total = torch.ones(4) if rank == 0 else spread(1)
    dist.reduce(total, 0)
    assert rank or torch.equal(total, torch.full((4,), float(size)))
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(outputs, spread(rank))
    assert all(torch.equal(output, spread(other)) for other, output in enumerate(outputs))
    for call in (
        lambda: dist.all_reduce(spread(1)),
        lambda: dist.all_gather([spread(0) for _ in range(size)], torch.ones(4)),
        lambda: dist.all_to_all([spread(0) for _ in range(size)], [torch.ones(4)] * size),
        lambda: dist.reduce_scatter(spread(0), [torch.ones(4)] * size),
        lambda: dist.scatter(spread(0), [torch.ones(4)] * size if rank == 0 else None, 0),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "share memory" in str(error), error
        else:
            raise AssertionError("elements that are one were written")


def several_of_which_one_is_refused(rank, size):
    """
    If one of several coalesced calls is refused, none of them has begun: the next calls of all ranks still match.
    """
    world, whole, wrong = dist.group.WORLD, torch.ones(size), torch.zeros(1).expand(size)
    for call in (
        lambda: world.allreduce_coalesced([whole, wrong]),
        lambda: world.all_gather_single_coalesced([whole, wrong], [torch.ones(1), torch.ones(1)]),
        lambda: world.all_gather_single_coalesced([whole], [torch.ones(1), torch.ones(1)]),
        lambda: world.reduce_scatter_single_coalesced([torch.ones(1), wrong], [whole, torch.ones(size * size)]),
        lambda: world.allgather_coalesced([[whole, wrong]] * size, [whole, whole]),
    ) if rank == 0 and size > 1 else ():
        try:
            call()
        except (RuntimeError, ValueError):
            continue
        raise AssertionError("not refused")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((3,), float(size)))


def values_of_futures(rank, size):
    """A future's value is a list of the tensors, as with Gloo."""
    tensor, parts = torch.ones(1), [torch.zeros(1) for _ in range(size)]
    for work in (dist.group.WORLD.allgather([parts], [tensor]), dist.all_gather(parts, tensor, async_op=True)):
        assert [value.data_ptr() for value in work.get_future().wait()] == [part.data_ptr() for part in parts]
    gathered = dist.gather(tensor, parts if rank == 0 else None, 0, async_op=True).get_future().wait()
    assert [value.data_ptr() for value in gathered] == ([part.data_ptr() for part in parts] if rank == 0 else [])


def among_others(rank, size):
    """Gloo takes the place of NCCL here. The group is of PyTorch's own class."""
    world = dist.group.WORLD
    assert type(world) is dist.ProcessGroup and {device.type for device in world._device_types} == {"cpu", "cuda"}
    assert world._get_backend(torch.device("cpu")).getBackendName() == "collectives"


class Calls(unittest.TestCase):
    def run_on(self, *programs):
        for size in (1, 2, 3):
            for program in programs:
                if not (size == 1 and program in (messages,)):
                    run(size, program)

    def test_every_type_and_shape_is_folded(self):
        self.run_on(folds)

    def test_every_type_and_shape_is_moved(self):
        self.run_on(moves)

    def test_tensors_may_be_views_and_share_memory(self):
        self.run_on(layouts)

    def test_everyone_sends_everyone_any_number_of_rows(self):
        self.run_on(everyone_to_everyone)
        run(4, everyone_to_everyone)

    def test_parts_of_any_size_are_folded_and_gathered(self):
        self.run_on(folded_parts)
        run(4, folded_parts)

    def test_complex_and_sparse_tensors_are_added(self):
        self.run_on(complex_and_sparse)

    def test_messages_meet_by_rank_and_tag(self):
        self.run_on(messages)

    def test_a_thousand_calls_may_be_in_flight(self):
        self.run_on(in_flight)

    def test_callbacks_may_wait_for_other_calls(self):
        self.run_on(callbacks_that_wait)

    def test_the_result_is_there_when_the_end_is_seen(self):
        self.run_on(ends_that_are_seen)

    def test_groups_work_on_threads_of_their_own(self):
        self.run_on(groups_on_threads)

    def test_what_cannot_be_is_refused_and_ends_nothing(self):
        self.run_on(refusals)

    def test_tensors_that_are_more_than_their_elements_are_refused(self):
        self.run_on(refuses_what_is_more_than_elements)

    def test_the_sign_of_a_view_goes_along(self):
        self.run_on(negative_views)

    def test_tensors_of_inference_mode_may_be_waited_for_outside(self):
        self.run_on(in_inference_mode)

    def test_parts_of_uneven_lengths_are_folded(self):
        self.run_on(uneven_parts)

    def test_tensors_without_memory_answer_for_themselves(self):
        self.run_on(fake_tensors)

    def test_elements_that_are_one_in_memory_are_read_and_not_written(self):
        self.run_on(tensors_of_one_element)

    def test_several_calls_as_one_begin_when_none_is_refused(self):
        self.run_on(several_of_which_one_is_refused)

    def test_futures_give_lists_of_tensors(self):
        self.run_on(values_of_futures)

    def test_a_backend_among_others_gives_the_same(self):
        for program in (among_others, folds, layouts, everyone_to_everyone):
            run(2, program, backend="cpu:collectives,cuda:gloo")


if __name__ == "__main__":
    unittest.main()
