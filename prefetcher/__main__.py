from rowcast.runtime.stops import hold


def main() -> None:
    hold()  # before the imports, which take a second
    from rowcast.command_line.prefetcher import app

    app(prog_name="prefetcher")


if __name__ == "__main__":
    main()
