"""The README's script, word for word, under torchrun."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

import collectives_torch

SOURCE = pathlib.Path(__file__).resolve().parents[1]
# Runs the script with different data on each rank: only averaged gradients keep the weights equal. Each rank writes its
# own file, because lines of ranks that share a stream may be broken up.
AROUND = """
import json, os, runpy, sys, torch
torch.manual_seed(int(os.environ["RANK"]))
ended = runpy.run_path(sys.argv[1], run_name="__main__")
parameters = list(ended["model"].parameters())
with open("ended" + os.environ["RANK"], "w") as file:
    json.dump([[parameter.tolist(), parameter.grad.tolist()] for parameter in parameters], file)
"""


def script():
    """Returns the README's first block of Python."""
    return (SOURCE / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]


class Readme(unittest.TestCase):
    def test_its_script_trains_on_two_ranks(self):
        self.assertNotIn(SOURCE, pathlib.Path(collectives_torch.__file__).parents, "the package comes from the wheel")
        self.assertLessEqual(len(script().splitlines()), 12)
        with tempfile.TemporaryDirectory() as folder:
            train, around = pathlib.Path(folder, "train.py"), pathlib.Path(folder, "around.py")
            train.write_text(script())
            around.write_text(AROUND)
            self.torchrun(folder, around, train)
            ended = [json.loads(pathlib.Path(folder, f"ended{rank}").read_text()) for rank in range(2)]
        self.assertEqual(len(ended[0]), 2, "the weights and the bias")
        self.assertEqual(ended[0], ended[1])

    def torchrun(self, folder, *command):
        torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        pipe = subprocess.PIPE
        job = subprocess.Popen([*torchrun, *map(str, command)], cwd=folder, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            output, errors = job.communicate(timeout=300)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # upon which torchrun ends its ranks
                job.wait()
        self.assertEqual(job.returncode, 0, output + errors)


if __name__ == "__main__":
    unittest.main()
