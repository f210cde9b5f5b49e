"""PyTorch's TCPStore client against a server that is none of its own: client.py PORT PART."""

import sys
import threading
from datetime import timedelta

import torch.distributed as dist

LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=300)
PORT = int(sys.argv[2])


def connect(timeout=LONG):
    return dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=timeout)


def pattern(length):
    return (bytes(range(251)) * (length // 251 + 1))[:length]


def raises(call, *words):
    try:
        call()
    except (dist.DistError, RuntimeError) as error:
        assert all(word in str(error) for word in words), f"{error!r} does not say {words}"
        return
    raise AssertionError("no error")


def every_query():
    store, other = connect(), connect()
    store.set("k", b"v")
    store.set("empty", b"")
    assert other.get("k") == b"v" and other.get("empty") == b""
    assert other.add("n", 41) == 41 and store.add("n", 1) == 42 and store.add("n", -50) == -8 and store.get("n") == b"-8"
    assert store.compare_set("k", "x", "y") == b"v" and store.compare_set("k", "v", "w") == b"w"
    assert store.compare_set("absent", "x", "y") == b"x" and store.compare_set("fresh", "", "y") == b"y"
    assert store.check(["k", "n", "fresh"]) and not store.check(["k", "absent"])
    store.wait(["k", "n", "fresh", "empty"])
    store.wait(["k"], SHORT)
    assert store.delete_key("fresh") and not store.delete_key("fresh")
    store.append("log", b"one,")
    assert store.check(["log"])
    other.append("log", b"two")
    assert other.num_keys() == 4
    assert store.multi_get(["log", "k", "empty"]) == [b"one,two", b"w", b""]
    store.multi_set(["m1", "m2"], [b"1", b""])
    assert other.multi_get(["m2", "m1", "m1"]) == [b"", b"1", b"1"]
    assert sorted(store.list_keys()) == ["empty", "k", "log", "m1", "m2", "n"], store.list_keys()
    assert store.num_keys() == 6
    store.barrier("alone", 1)
    assert store.has_extended_api()
    copy = store.clone()
    assert copy.get("k") == b"w"
    # Bytes that are no text, in keys that are no English.
    store.set("schlüssel/鍵", bytes(range(256)))
    assert other.get("schlüssel/鍵") == bytes(range(256))


def queues():
    store, other = connect(), connect()
    store.queue_push("q", b"first")
    store.queue_push("q", b"")
    store.queue_push("q", b"third")
    assert store.queue_len("q") == 3 and store.check(["q"])
    assert [other.queue_pop("q") for _ in range(3)] == [b"first", b"", b"third"]
    assert other.queue_len("q") == 0 and not store.check(["q"])
    raises_empty = False
    try:
        store.queue_pop("q", block=False)
    except dist.QueueEmptyError:
        raises_empty = True
    assert raises_empty
    threading.Timer(0.2, lambda: other.queue_push("q", b"late")).start()
    assert store.queue_pop("q") == b"late"


def prefixes():
    store = connect()
    inner = dist.PrefixStore("job", store)
    nested = dist.PrefixStore("group/0", inner)
    nested.set("k", b"v")
    assert store.get("job/group/0/k") == b"v" and inner.get("group/0/k") == b"v"
    assert nested.add("n", 5) == 5 and nested.multi_get(["k", "n"]) == [b"v", b"5"] and nested.check(["k"]) and not inner.check(["k"])
    assert nested.compare_set("k", "v", "w") == b"w" and nested.delete_key("k") and not store.check(["job/group/0/k"])
    raises(lambda: nested.wait(["absent"], SHORT), "timeout", "job/group/0/absent")


def timeouts():
    store, other = connect(), connect()
    store.set("here", b"")
    for round in range(3):
        raises(lambda: store.wait(["here", "absent"], SHORT), "timeout", "/absent")
        # The connection is as good as before.
        assert store.add("rounds", 1) == round + 1
    store.set_timeout(SHORT)
    raises(lambda: store.get("absent"), "timeout")
    raises(lambda: store.multi_get(["here", "absent"]), "timeout")
    raises(lambda: store.queue_pop("nothing"), "timeout")
    raises(lambda: store.barrier("of two", 2), "timeout")
    other.set("absent", b"now")
    assert store.get("absent") == b"now" and store.num_keys() >= 3
    # A cancellation and the end of a wait that cross: whichever wins, the answers stay in step.
    store.set_timeout(LONG)
    won = 0
    for round in range(60):
        key = f"race/{round}"
        timer = threading.Timer(0.005, lambda: other.set(key, b"x"))
        timer.start()
        try:
            store.wait([key], timedelta(milliseconds=5 + round % 3))
            won += 1
        except dist.DistStoreError as error:
            assert "timeout" in str(error), error
        timer.join()
        assert store.add("in step", 1) == round + 1 and store.get(key) == b"x"
    print("races won:", won)


def big_values():
    store, other = connect(), connect()
    limit = pattern(8 << 20)
    store.set("big", limit)
    assert other.get("big") == limit
    store.multi_set(["a", "b"], [limit, limit[:-1]])
    assert other.multi_get(["a", "b"]) == [limit, limit[:-1]]
    store.delete_key("a")
    long_key = "k" * 8191
    store.set(long_key, b"long")
    assert other.get(long_key) == b"long"

    # Beyond the limit that PyTorch's own server has, a client is dropped, and the others go on.
    def too_big():
        third = connect()
        third.set("huge", bytes(64 << 20))
        third.num_keys()

    raises(too_big)
    assert not other.check(["huge"]) and other.get("big") == limit


def many_at_once():
    clients = 48
    stores = [connect() for _ in range(clients)]
    failures = []

    def run(rank):
        try:
            store = stores[rank]
            store.set(f"rank/{rank}", str(rank))
            values = store.multi_get([f"rank/{other}" for other in range(clients)])
            assert values == [str(other).encode() for other in range(clients)], values
            for round in range(5):
                store.add("sum", rank)
                store.barrier(f"round/{round}", clients)
            assert store.add("sum", 0) == 5 * clients * (clients - 1) // 2
            store.queue_push("queue", str(rank))
            store.add("popped", int(store.queue_pop("queue")))
            store.barrier("end", clients)
            assert store.add("popped", 0) == clients * (clients - 1) // 2
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


def wait_for_ever():
    store = connect()
    store.set("waiting", b"")
    print("waits", flush=True)
    store.wait(["never"])


PARTS = (every_query, queues, prefixes, timeouts, big_values, many_at_once, wait_for_ever)
{part.__name__: part for part in PARTS}[sys.argv[1]]()
print("done")
