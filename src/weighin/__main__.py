from weighin.cli import main

main()
