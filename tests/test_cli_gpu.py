"""The owner of a GPU who installed without the extra is told so: with a driver library made for the occasion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) { strncpy(name, "NVIDIA Test GPU", length); return 0; }
int cuDeviceTotalMem_v2(unsigned long* bytes, int device) { *bytes = 1ul << 34; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
    *value = which == 75 ? 9 : which == 76 ? 0 : 100;
    return 0;
}
"""
ADVICE = "Install them with `pip install 'warpsmith[cuda]'`."
# as on a machine without the extra
PROGRAM = "import sys; sys.modules['cuda'] = None; from warpsmith.cli import main; sys.exit(main(sys.argv[1:]))"


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, env=environment)


def test_run_and_doctor_say_what_to_install(tmp_path: Path) -> None:
    result = command(tmp_path, "run", "-p", "x", "-n", "1")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if "NVIDIA Test GPU is not used." in line)
    assert line.endswith(ADVICE)
    facts = json.loads(command(tmp_path, "doctor", "--json").stdout)
    assert facts["devices"]["cuda"].endswith(ADVICE)
    assert facts["device"] == "cpu"
    assert ADVICE in command(tmp_path, "doctor").stdout


def test_nobody_is_told_who_chose_the_cpu(tmp_path: Path) -> None:
    result = command(tmp_path, "run", "-p", "x", "-n", "1", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "pip install" not in result.stderr
