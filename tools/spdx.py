"""The list of what candle-p1 depends on, as SPDX 2.3 in JSON, with the versions installed here.

``make wheel`` writes it beside the wheel (https://spdx.github.io/spdx-spec/v2.3/).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import Distribution, distributions
from typing import Any
from uuid import uuid4

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT, UNKNOWN = "candle-p1", "NOASSERTION"


def needs(package: Distribution, extras: Iterable[str] = ("",)) -> set[str]:
    """Returns the names of what a package requires on this machine, with any of some extras."""
    return {
        canonicalize_name(each.name)
        for each in map(Requirement, package.requires or ())
        if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    }


def describe(name: str, package: Distribution) -> dict[str, Any]:
    """Returns the entry of a package."""
    about: dict[str, Any] = package.metadata.json
    kinds = [each for each in about.get("classifier", []) if each.startswith("License ::")]
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl"}
    return {
        "name": name,
        "SPDXID": f"SPDXRef-{name}",
        "versionInfo": package.version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseDeclared": about.get("license_expression", UNKNOWN),
        "licenseComments": "; ".join(kinds) or about.get("license", "").partition("\n")[0],
        "externalRefs": [{**reference, "referenceLocator": f"pkg:pypi/{name}@{package.version}"}],
    }


def document() -> dict[str, Any]:
    """Returns the list, of the installed packages that are needed, with the extras or without."""
    installed = {str(canonicalize_name(each.name)): each for each in distributions()}
    root = installed[ROOT]
    extras = root.metadata.get_all("Provides-Extra", [])
    optional = (needs(root, extras) - needs(root) - {ROOT}) & installed.keys()
    links = [(name, "OPTIONAL_DEPENDENCY_OF", ROOT) for name in sorted(optional)]
    found = [ROOT, *sorted(optional)]
    for name in found:  # which grows
        needed = sorted(needs(installed[name]) & installed.keys())
        links += [(name, "DEPENDS_ON", each) for each in needed]
        found += [each for each in needed if each not in found]
    keys = ("spdxElementId", "relationshipType", "relatedSpdxElement")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{ROOT}-{root.version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/{ROOT}-{root.version}-{uuid4()}",
        "creationInfo": {
            "created": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "creators": [f"Tool: {ROOT}-{root.version}"],
        },
        "packages": [describe(name, installed[name]) for name in sorted(found)],
        "relationships": [
            dict(zip(keys, (f"SPDXRef-{a}", kind, f"SPDXRef-{b}"), strict=True))
            for a, kind, b in [("DOCUMENT", "DESCRIBES", ROOT), *links]
        ],
    }


if __name__ == "__main__":
    print(json.dumps(document(), indent=2))
