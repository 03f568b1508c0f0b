"""MkDocs: pages of reference that are generated from the code: parameters, commands, the record."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import click
from mkdocs.structure.files import File

from candle_p1 import cli
from candle_p1.benchmark import find_benchmark
from candle_p1.parameters.parameter import Role
from candle_p1.records import schema

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")


def on_files(files, config):
    """Adds the generated pages."""
    pages = {f"reference/{name}.md": parameters(name) for name in BENCHMARKS}
    pages |= {"reference/commands.md": commands(), "reference/record.md": record()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def table(heading, rows):
    """Returns the lines of a table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return ["", *("| " + " | ".join(cells) + " |" for cells in lines), ""]


def plain(text):
    """Returns text in which nothing is Markdown, on one line."""
    escaped = re.sub(r"([\\`*_{}\[\]>#|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("<", "&lt;")  # which a backslash does not escape


def code(text):
    """Returns text as code."""
    return f"`{text}`"


def parameters(name):
    """Returns the page of a benchmark's parameters."""
    benchmark = find_benchmark(str(ROOT / "benchmarks" / name))
    declaration = benchmark.declaration
    own = declaration.read_file(benchmark.model_file, "model file")
    groups: dict[str, list[list[str]]] = {}
    for parameter in declaration.parameters.values():
        default = own[parameter.name][0] if parameter.name in own else parameter.default
        flags = ", ".join(code(flag) for flag in (*parameter.short, f"--{parameter.name}"))
        help_ = plain(f"{parameter.help} [{parameter.allowed}]")
        row = [flags, code(repr(default)), parameter.role.name.lower(), help_]
        groups.setdefault(parameter.group or "of this benchmark", []).append(row)
    lines = [
        f"# Parameters of {name.upper()}",
        "",
        f"Defaults are those of `{benchmark.model_file.name}` or, if it sets none, those of the"
        " declaration. The role of a parameter says what it is for:",
        *table(["role", "parameters with it"], [[r.name.lower(), plain(r.value)] for r in Role]),
    ]
    for group, rows in groups.items():
        lines += [
            f"## {group[0].upper()}{group[1:]}",
            *table(["flag", "default", "role", "meaning"], rows),
        ]
    return "\n".join(lines)


def commands():
    """Returns the page of all commands and their options."""
    lines = ["# All commands", "", "As `--help` shows them."]
    top = cli.cli.context_class(cli.cli, info_name="candle-p1")

    def describe(command, context):
        usage = " ".join(command.collect_usage_pieces(context))
        lines.extend(
            ["", f"## {context.command_path}", "", f"    {context.command_path} {usage}", ""]
        )
        help_ = inspect.cleandoc(command.help or "").replace("\b\n", "")
        lines.extend(f"{plain(part)}\n" for part in help_.split("\n\n"))
        records = [parameter.get_help_record(context) for parameter in command.params]
        rows = [[code(flag), plain(text)] for flag, text in filter(None, records) if text]
        if rows:
            lines.extend(table(["option", "meaning"], rows))
        if examples := getattr(command, "examples", ()):
            lines.extend(["", "Examples:", "", *(f"    {example}" for example in examples)])
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                describe(found, click.Context(found, info_name=name, parent=context))

    for name in cli.cli.list_commands(top):
        command = cli.cli.get_command(top, name)
        describe(command, click.Context(command, info_name=name, parent=top))
    return "\n".join(lines)


def record():
    """Returns the page of the record's fields."""
    text = json.loads(schema.generate())
    types = {"RunRecord": text} | text["$defs"]
    lines = [
        "# Fields of the record",
        "",
        "`run.json` holds a [RunRecord](#runrecord). Its JSON Schema is"
        f" `candle_p1/records/schemas/{schema.SCHEMA_PATH.name}`. Keys name their units: `_s` is"
        " seconds, `_bytes` bytes, `_j` joules, `_w` watts. What was not measured is absent.",
    ]
    for name, facts in types.items():
        rows = [
            [code(key), _type(of), plain(of.get("description", ""))]
            for key, of in facts["properties"].items()
        ]
        lines += [f"## {name}", "", plain(facts["description"])]
        lines += table(["key", "value", "meaning"], rows)
    return "\n".join(lines)


def _type(facts):
    """Returns a JSON Schema's type in words, with a link to a type of the record."""
    if "$ref" in facts:
        name = facts["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in facts:
        return " or ".join(_type(each) for each in facts["anyOf"])
    if "const" in facts or "enum" in facts:
        return ", ".join(
            code(json.dumps(value)) for value in facts.get("enum", [facts.get("const")])
        )
    kind = facts.get("type")
    if kind == "array":
        return f"list of {_type(facts['items'])}" if "items" in facts else "list"
    if kind == "object":
        of = facts.get("additionalProperties")
        return f"{_type(of)} by name" if isinstance(of, dict) else "object"
    return kind or "any value"
