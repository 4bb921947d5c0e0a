"""The `paceline` command.

    paceline serve FILE        run a Serve config file until Ctrl-C
    paceline demo              the demo: model, server, one answer with and without speculation
    paceline demo-model        write the demo model as safetensors, print its directory
    paceline chat              talk to a running server
    paceline bench URL         measure a server with the OpenAI API, ours or another
    paceline explain FILE      every resolved setting, with its source

A mistake that the person at the terminal can fix is one line on stderr and status 1. Ctrl-C and
SIGTERM end a command alike: status 0 once it serves, 130 or 143 before; nothing stays behind.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any

from deploy.bench.options import add_options as add_bench_options
from deploy.errors import UserError
from deploy.stops import Stops


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # `explain` has options of its own, in the configuration layer.
    if arguments[:1] == ["explain"]:
        from deploy.serve_file import bundles_of
        from specconfig.explaining.explain import main as explain

        return explain(arguments[1:], bundles=bundles_of)
    options = _parser().parse_args(arguments)
    with Stops() as stops:
        try:
            code: int = options.run(options, stops)
            return code
        except UserError as error:
            print(f"paceline: {error}", file=sys.stderr)
            return 1
        except ModuleNotFoundError as error:
            print(
                f"paceline: the package {error.name!r} is missing; install Paceline with its "
                "dependencies: pip install -c constraints.txt -e .",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            return stops.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"paceline {_version()}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = verbs.add_parser("serve", help="run a Serve config file until Ctrl-C")
    serve.add_argument("file", help="YAML file, as for `serve run`")
    _add_server_options(serve)
    serve.set_defaults(run=_serve)

    demo = verbs.add_parser("demo", help="serve the demo model and show what speculation does")
    demo.add_argument("--file", default=None, help="another config file for the demo model")
    demo.add_argument("--once", action="store_true", help="end after the show")
    _add_server_options(demo)
    demo.set_defaults(run=_demo)

    model = verbs.add_parser(
        "demo-model", help="write the demo model as safetensors, for training and for several ranks"
    )
    model.set_defaults(run=_demo_model)

    chat = verbs.add_parser("chat", help="talk to a running server")
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    chat.add_argument("--temperature", type=float, default=0.0)
    chat.add_argument("--max-tokens", type=int, default=256)
    chat.add_argument("--no-speculation", action="store_true", help="plain decoding")
    chat.set_defaults(run=_chat)

    bench = verbs.add_parser("bench", help="measure a server with the OpenAI API")
    add_bench_options(bench)
    bench.set_defaults(run=_bench)

    explain = verbs.add_parser("explain", help="show every resolved setting of a file")
    explain.set_defaults(run=lambda options, stops: 0)  # handled before parsing; listed for --help
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=None, help="HTTP port (file's, else 8000)")
    parser.add_argument("--host", default=None, help="HTTP address (file's, else 127.0.0.1)")
    parser.add_argument(
        "--address",
        default=None,
        help="a running Ray cluster to use; without it a private one is started and ended",
    )


def _port(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port; allowed: 1 to 65535")


def _version() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _serve(options: argparse.Namespace, stops: Stops) -> int:
    with stops.open():
        from deploy.local import say_to_stdout, serving
        from deploy.serve_file import read_serve_file

        file = read_serve_file(options.file, host=options.host, port=options.port)
    with serving(file, options.address, say_to_stdout, stops):
        say_to_stdout(f"Ready: {file.url}  (Ctrl-C ends it)")
        stops.wait()
    return 0


def _demo(options: argparse.Namespace, stops: Stops) -> int:
    with stops.open():
        from deploy.demo import demo_file, link_demo_model
        from deploy.local import say_to_stdout, serving
        from deploy.serve_file import read_serve_file
        from deploy.show import show

        file = read_serve_file(
            options.file or demo_file(),
            host=options.host,
            port=options.port,
            overrides={"model": str(link_demo_model())},
        )
    with serving(file, options.address, say_to_stdout, stops):
        with stops.open():
            show(file.url, say_to_stdout)
        if not options.once:
            say_to_stdout("\nServing until Ctrl-C.")
            stops.wait()
    return 0


def _demo_model(options: argparse.Namespace, stops: Stops) -> int:
    with stops.open():
        from deploy.demo import ensure_demo_model

        print(ensure_demo_model(lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _chat(options: argparse.Namespace, stops: Stops) -> int:
    with stops.open():
        from deploy.terminal import ChatClient, chat_loop

        fields: dict[str, Any] = {
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        if options.no_speculation:
            fields["speculation"] = {"enabled": False}
        chat_loop(ChatClient(options.url, os.environ.get("PACELINE_API_KEY")), **fields)
    return 0


def _bench(options: argparse.Namespace, stops: Stops) -> int:
    with stops.open():
        from deploy.bench.command import bench
    # A signal ends the run, not the command: what was measured is shown.
    return bench(options, stops, lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main())
