"""Build the documentation: `python docs/build_site.py` writes build/site; warnings are errors, and nothing is fetched.

Pages are docs/**/*.md, documents that are next to what they describe, and those that code writes (`reference_pages`).
They are gathered in build/pages with their links rewritten, and made HTML by Sphinx. `--pages-only` stops before that.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from reference_pages import PAGES, ROOT

DOCS, STAGE, SITE = ROOT / "docs", ROOT / "build" / "pages", ROOT / "build" / "site"
ELSEWHERE = (
    "README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "ARCHITECTURE.md", "deploy/README.md", "benchmarks/README.md",
    "firmware/PROTOCOL.md", "firmware/ports/PORTING.md", "planner/port_planner/milp/FORMULATION.md", "agent/port_agent/energy/README.md",
)  # fmt: skip
"""Documents that are next to what they describe; so do the results of benchmarks."""
NOT_ON_GITHUB = "`make docs` adds commands, functions, settings, exit codes, formats and protocols"
"""On the site, links stand here."""
CONTENTS = {
    "Tutorials": ("tutorials/first-script", "tutorials/first-language-model", "tutorials/first-night-on-a-pi", "tutorials/first-board", "tutorials/three-devices"),
    "How to": (
        "how-to/run-a-script", "how-to/plan-a-bundle", "how-to/fine-tune", "how-to/run-the-service", "how-to/several-devices", "boards",
        "deploy/README", "how-to/choose-ram", "how-to/slow-card", "how-to/add-a-sensor", "how-to/add-an-operator", "how-to/add-a-board", "how-to/add-a-strategy",
    ),
    "Concepts": (
        "concepts/guarded-memory", "concepts/planning", "planner/port_planner/milp/FORMULATION", "concepts/exactness", "concepts/energy",
        "agent/port_agent/energy/README", "concepts/policy", "concepts/federation", "glossary",
    ),
    "Reference": (*(f"reference/{name}" for name in ("support", *PAGES)), "firmware/PROTOCOL", "firmware/ports/PORTING"),
    "Project": ("README", "SECURITY", "benchmarks/README", "CHANGELOG", "changes/unreleased", "changes/0.2.0", "releasing", "ARCHITECTURE", "CONTRIBUTING", "CODE_OF_CONDUCT"),
}  # fmt: skip


def main() -> int:
    """Gather the pages, build the site; the exit code is Sphinx's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages-only", action="store_true", help="gather the pages in build/pages and stop")
    arguments = parser.parse_args()
    gather(STAGE)
    if arguments.pages_only:
        return 0
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-E",
        "-c",
        str(DOCS),
        "-b",
        "html",
        str(STAGE),
        str(SITE),
    ]
    return subprocess.run(command).returncode


def gather(stage: Path) -> None:
    """Write all pages, with their pictures, into an empty directory."""
    shutil.rmtree(stage, ignore_errors=True)
    pages = sources()
    for source, page in pages.items():
        target = stage / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_links_of_the_site(source.read_text(), source, page, pages))
    for name, write in PAGES.items():
        page = Path("reference") / f"{name}.md"
        (stage / page).write_text(with_links_of_the_site(write(), DOCS / page, page, pages))
    shutil.copytree(DOCS / "images", stage / "images")
    index_page = stage / "index.md"
    links = ", ".join(f"[{name.replace('-', ' ')}](reference/{name}.md)" for name in PAGES)
    index_page.write_text(
        index_page.read_text().replace(NOT_ON_GITHUB, f"{links}, [protocol of boards](firmware/PROTOCOL.md)")
    )
    with index_page.open("a") as index:
        index.write("".join(toctree(title, names) for title, names in CONTENTS.items()))
        results = sorted(str(page.with_suffix("")) for page in pages.values() if "results" in page.parts)
        index.write(toctree("Results", tuple(results)))


def sources() -> dict[Path, Path]:
    """Return the files of the pages, and where each stands on the site."""
    own = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    beside = [*(ROOT / name for name in ELSEWHERE), *results]
    return {**own, **{path: path.relative_to(ROOT) for path in beside if path.is_file()}}


def with_links_of_the_site(text: str, source: Path, page: Path, pages: dict[Path, Path]) -> str:
    """Return a page whose links lead to other pages of the site; other files are named as files.

    Pictures and links to other sites stay. Code is left alone.
    """
    up = "../" * (len(page.parts) - 1)

    def link(match: re.Match[str]) -> str:
        bang, title, target = match.groups()
        if target.startswith(("http://", "https://", "#")):
            return match[0]
        file, _, heading = target.partition("#")
        path = (source.parent / file).resolve()
        if bang:
            return f"![{title}]({up}images/{path.name})"
        if path in pages:
            return f"[{title}]({up}{pages[path]}{'#' + heading if heading else ''})"
        named = path.relative_to(ROOT)
        return f"{title} (`{named}`)" if title.strip("`") != str(named) else f"`{named}`"

    return re.sub(
        r"```.*?```|(!?)\[((?:[^\]`]|`[^`]*`)+)\]\(([^)\s]+)\)|`[^`\n]*`",
        lambda match: link(match) if match[3] else match[0],
        text,
        flags=re.S,
    )


def toctree(title: str, names: tuple[str, ...]) -> str:
    """Return a part of the contents."""
    return "\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(names) + "\n```\n"


if __name__ == "__main__":
    sys.exit(main())
