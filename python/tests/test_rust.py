"""Ranks in Rust and in Python in one group."""

import os
import pathlib
import socket
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Rust(unittest.TestCase):
    def test_a_rank_in_rust_feeds_ranks_that_train_in_python(self):
        program = os.environ.get("COLLECTIVES_RANK_OF_TORCH", str(ROOT / "target/debug/examples/rank_of_torch"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        job = dict(os.environ, WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
        script = [sys.executable, "-W", "ignore", str(ROOT / "python/examples/train_with_rust.py")]
        ranks = []
        try:
            for rank, command in enumerate([script, script, [program]]):
                ranks.append(subprocess.Popen(command, env=dict(job, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            outputs = [rank.communicate(timeout=40) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        self.assertEqual([rank.returncode for rank in ranks], [0, 0, 0], outputs)
        self.assertEqual(outputs[0][0], outputs[1][0])
        weight, bias = eval(outputs[0][0])
        self.assertTrue(abs(weight - 3) < 0.1 and abs(bias + 1) < 0.1, outputs)
        self.assertIn("the last loss is 0.0", outputs[2][0])


if __name__ == "__main__":
    unittest.main()
