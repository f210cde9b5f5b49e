"""PyTorch finds the backend without an import, and its own import loads little of the package."""

import os
import subprocess
import sys
import tempfile
import unittest

USE = """
dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""
IMPORT = "import sys, torch, torch.distributed as dist\n"
LOADED = 'print(sorted(name for name in sys.modules if name.partition(".")[0] == "collectives_torch"))\n'
DEFAULT = 'print(dist.Backend.default_device_backend_map["cpu"])\n'
# The package is partly loaded when PyTorch, which it imports, imports it.
FIRST = "import collectives_torch\nprint(collectives_torch.CollectivesBackend.__name__)\n"
BROKEN = """
import sys
sys.modules["collectives_torch._core"] = None
""" + IMPORT


def output(script, fails=False, **variables):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c", script]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    if (ran.returncode != 0) != fails:
        raise AssertionError(ran.stdout + ran.stderr)
    return ran.stderr if fails else ran.stdout


class Autoload(unittest.TestCase):
    def test_a_group_needs_no_import_of_the_package(self):
        lines = output(IMPORT + LOADED + DEFAULT + USE).splitlines()
        self.assertEqual(lines, ["['collectives_torch']", "gloo", "collectives [1.0, 1.0]"])

    def test_without_autoload_a_group_needs_the_import(self):
        off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self.assertIn("collectives", output(IMPORT + USE, fails=True, **off).splitlines()[-1])
        self.assertEqual(output(FIRST + IMPORT + USE, **off).splitlines(), ["CollectivesBackend", "collectives [1.0, 1.0]"])

    def test_the_package_may_be_imported_before_pytorch(self):
        self.assertEqual(output(FIRST + IMPORT + USE).splitlines(), ["CollectivesBackend", "collectives [1.0, 1.0]"])

    def test_a_package_that_cannot_be_loaded_breaks_only_its_own_groups(self):
        output(BROKEN + "print(torch.ones(1).item())")
        words = output(BROKEN + USE, fails=True)
        self.assertIn("the backend collectives cannot be loaded with PyTorch 2.", words)
        self.assertIn("build and install collectives-torch again", words)


if __name__ == "__main__":
    unittest.main()
