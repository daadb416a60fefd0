"""The weekly run of the newest versions writes what happened, and leaves the rest of its page alone."""

from __future__ import annotations

from pathlib import Path

import newest
import pytest

ROOT = Path(__file__).parents[1]
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.a" name="test_three"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="test_four"><error message="no fixture `x` in /some/where/else/file"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_has_counts_reasons_and_versions(tmp_path: Path) -> None:
    """Passed, failed and skipped tests are counted; each failure and each module that was not imported is named."""
    junit, imports = tmp_path / "tests.xml", tmp_path / "imports"
    junit.write_text(JUNIT)
    imports.write_text("12\nmlflow_llm.x\tImportError: gone\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{newest.BEGIN}\nold\n{newest.END}\n\nAfter\n")
    assert newest.main("report", str(page), str(imports), str(junit), "tests/a") == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\n\nAfter\n")
    assert "old" not in text
    assert "- imports: 11 of 12 modules\n- tests: 1 passed, 2 failed, 1 skipped\n- what was run: `tests/a`\n" in text
    assert "- `mlflow_llm.x`: `ImportError: gone`\n" in text
    assert "- `tests.a::test_two`: `assert 1 == 2`\n- `tests.b::test_four`: `no fixture 'x' in …/file`\n" in text
    assert "\n| transformers | `<6,>=5.20` | 5." in text


def test_a_page_without_marks_is_refused() -> None:
    """An outcome is never written over a page that has no place for it."""
    with pytest.raises(ValueError, match="must have each of"):
        newest.replace_outcome("# a page\n", "an outcome")


def test_the_page_has_a_place_for_the_outcome() -> None:
    """docs/compatibility.md has both marks once, around an outcome with versions."""
    text = (ROOT / "docs/compatibility.md").read_text()
    assert newest.replace_outcome(text, "new").count("new\n\n" + newest.END) == 1
    assert "| transformers |" in text


def test_modules_of_environments_of_their_own_are_not_imported() -> None:
    """Modules that only Alembic or vLLM can load are left out; their neighbours are not."""
    left_out = ("x.migrations.env", "mlflow_llm.serving.engine.vllm.race", "mlflow_llm.__main__")
    assert all(newest.NOT_IMPORTED.search(name) for name in left_out)
    assert not newest.NOT_IMPORTED.search("mlflow_llm.serving.engine.vllm.sequences")
