"""MkDocs: pages kept elsewhere in the repository, and links as the repository has them.

Links in Markdown files are relative to the file, so that they also work where the repository is
browsed. On the site, a link to a file that is not a page is shown as text. A page that loads
something from another host, such as a font, is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
FOREIGN = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preload|preconnect)[^>]*href=["']?(?:https?:)?//[^"'\s>]+""",
    re.IGNORECASE,
)


def _elsewhere() -> dict[str, str]:
    """Returns the pages that are kept outside docs/: page, file of the repository."""
    pages = {
        "index.md": "README.md",
        "contributing.md": "CONTRIBUTING.md",
        "changelog.md": "CHANGELOG.md",
        "jobs.md": "jobs/README.md",
    }
    for file in sorted([*ROOT.glob("benchmarks/*/README.md"), *ROOT.glob("examples/**/README.md")]):
        source = file.relative_to(ROOT).as_posix()
        pages[source.replace("/README.md", ".md")] = source
    return pages


ELSEWHERE = _elsewhere()
PAGES = {source: page for page, source in ELSEWHERE.items()}


def on_files(files, config):
    """Adds the pages that are kept elsewhere."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links that are right in the repository into links that are right on the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(ELSEWHERE.get(here, f"docs/{here}"))

    def resolve(link):
        source = posixpath.normpath(posixpath.join(folder, link["path"]))
        if (ROOT / source / "README.md").is_file():
            source += "/README.md"
        target = PAGES.get(source, source.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            # MkDocs reports a link to a file that does not exist.
            return link["text"] if (ROOT / source).exists() and not link["image"] else link[0]
        path = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{link['image']}[{link['text']}]({path}{link['anchor'] or ''})"

    return LINK.sub(resolve, markdown)


def on_post_page(output, page, config):
    """Refuses a page that a reader without network access would see incompletely."""
    if foreign := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads a file from another host: {foreign[0]}")
    return output
