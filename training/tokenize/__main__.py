"""Turns text into a Megatron indexed dataset, in parallel: PREFIX.bin, .idx and .tokenizer.json.

    python -m training.tokenize --input 'DIR/c4-train.*.json.gz' --tokenizer FILE --output PREFIX

Documents are ordered by file name, then as in the file. PREFIX.problems.txt lists skipped documents with file
and line, PREFIX.json counts them. After an interruption, even SIGKILL, the same command continues: finished
files are kept in PREFIX.partial until PREFIX.bin and .idx are complete.
"""

if __name__ == "__main__":
    from training.process.start import prepare_process

    prepare_process()  # before the other imports, which take seconds

from training.tokenize.tokenize import main

if __name__ == "__main__":
    main()
