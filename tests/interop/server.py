"""PyTorch's TCPStore server, which does in Python what its standard input asks for: server.py libuv|legacy [PORT WORKERS]."""

import sys
from datetime import timedelta

import torch.distributed as dist


def pattern(length):
    return (bytes(range(251)) * (length // 251 + 1))[:length]


kind, port, workers = [*sys.argv[1:], 0, None][:3]
store = dist.TCPStore(
    "127.0.0.1",
    int(port),
    workers and int(workers),
    is_master=True,
    wait_for_workers=workers is not None,
    timeout=timedelta(seconds=60),
    use_libuv=kind == "libuv",
)
assert store.libuvBackend == (kind == "libuv")
print("port", store.port, flush=True)
for line in sys.stdin:
    call, *arguments = line.split()
    if call == "set":
        store.set(*arguments)
    elif call == "get":
        print("is", store.get(arguments[0]).decode(), flush=True)
        continue
    elif call == "fill":
        store.set(arguments[0], pattern(int(arguments[1])))
    elif call == "compare":
        assert store.get(arguments[0]) == pattern(int(arguments[1]))
    elif call == "push":
        store.queue_push(*arguments)
    elif call == "keys":
        print("is", *sorted(store.list_keys()), flush=True)
        continue
    else:
        raise ValueError(line)
    # What was only sent may be overtaken on another connection; what is answered may not.
    store.num_keys()
    print("did", call, flush=True)
