"""Ranks that torchrun restarts after one has died find a store with the keys of the earlier attempt."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

# Rank 1 dies in the first attempt. In the second, each rank writes its sum to a file.
SCRIPT = """
import os, pathlib, signal, torch, torch.distributed as dist, collectives_torch
dist.init_process_group("collectives")
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
group, tensor = dist.new_group([0, 1]), torch.ones(1)
dist.all_reduce(tensor)
if (rank, life) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(tensor, group=group)
dist.all_reduce(tensor, group=dist.split_group(split_ranks=[[0, 1]]))
pathlib.Path(f"ended{rank}").write_text(f"{life} {tensor.item()}")
dist.destroy_process_group()
"""


class Restarts(unittest.TestCase):
    def test_ranks_that_are_started_anew_meet(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "script.py")
            script.write_text(SCRIPT)
            command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script]
            pipe = subprocess.PIPE
            job = subprocess.Popen(command, cwd=folder, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
            try:
                output, errors = job.communicate(timeout=200)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGTERM)  # upon which torchrun ends its ranks
                    job.wait()
            self.assertEqual(job.returncode, 0, output + errors)
            self.assertEqual([pathlib.Path(folder, f"ended{rank}").read_text() for rank in range(2)], ["1 8.0", "1 8.0"])


if __name__ == "__main__":
    unittest.main()
