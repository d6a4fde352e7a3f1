"""Every page about a trainer can be found from the README and from the page about the wheel index."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs" / "integrations").glob("*.md"))


def test_prime_rl_has_a_page():
    assert "prime_rl.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_page_is_linked(page):
    assert f"](docs/integrations/{page})" in (ROOT / "README.md").read_text()
    assert f"](integrations/{page})" in (ROOT / "docs" / "index.md").read_text()
