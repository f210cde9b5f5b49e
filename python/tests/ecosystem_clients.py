"""
One rank of a client of torch.distributed, for `ecosystem`. Usage: ecosystem_clients.py CLIENT BACKEND FILE

Rank 0 writes what the client has computed to FILE: numbers that must have the same bits with each backend.
"""

import hashlib
import json
import os
import runpy
import sys

import torch
import torch.distributed as dist

STEPS = 5


def digest(tensors):
    """Returns a hash of the bits of tensors."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()[:16]


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batches():
    """Returns this rank's batches."""
    torch.manual_seed(100 + int(os.environ["RANK"]))
    return [torch.randn(4, 8) for _ in range(STEPS)]


def accelerate(script):
    """Runs one of accelerate's own test scripts. It finds the default group, which exists already."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [script]
    runpy.run_module(f"accelerate.test_utils.scripts.{script}", run_name="__main__")
    return "passed"


def transformers():
    """Trains a small GPT-2 with random weights."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(3)
    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
    tokens = torch.randint(64, (32, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
        loss = Trainer(net, arguments, train_dataset=data).train().training_loss
    return [loss, digest(net.parameters())]


def fabric(backend):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    worker = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
    worker.launch()
    net = model()
    net, optimizer = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in batches():
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        worker.backward(loss)
        optimizer.step()
    return [worker.all_reduce(loss.detach()).item(), digest(net.parameters())]


def lightning(backend):
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, _index):
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 8)), batch_size=4)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(accelerator="cpu", devices=2, max_steps=STEPS, strategy=DDPStrategy(process_group_backend=backend), **quiet)
    module = Module()
    trainer.fit(module, data)
    return [trainer.callback_metrics["loss"].item(), digest(module.parameters())]


def deepspeed(backend, stage):
    import deepspeed

    # DeepSpeed would compile its own all-reduce for inference with PyTorch's headers, which are not installed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The default group exists already, and DeepSpeed uses it.
    deepspeed.init_distributed(dist_backend=backend)
    net = model()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    losses = []
    for batch in batches():
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    client, backend, file = sys.argv[1:]
    name, _, detail = client.partition(" ")
    if name not in ("fabric", "lightning"):
        dist.init_process_group(backend)
    run = {
        "accelerate": lambda: accelerate(detail),
        "transformers": transformers,
        "fabric": lambda: fabric(backend),
        "lightning": lambda: lightning(backend),
        "deepspeed": lambda: deepspeed(backend, int(detail)),
    }
    result = run[name]()
    if os.environ["RANK"] == "0":
        with open(file, "w") as out:
            json.dump(result, out)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
