from rowcast.runtime.stops import hold


def main() -> None:
    hold()  # before the imports, which take a second
    from rowcast.command_line.trainer import app

    app(prog_name="trainer")


if __name__ == "__main__":
    main()
