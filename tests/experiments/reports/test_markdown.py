"""Markdown of any text."""

from experiments.reports.markdown import fenced, inline


def test_markdown_holds_any_text():
    assert fenced("a ```` b") == "`````text\na ```` b\n`````\n"
    assert inline("a\n b") == "`a b`" and inline("`x`") == "`` `x` ``" and inline("") == "`  `"
    assert len(inline("y" * 200)) == 82
