#!/bin/sh
# An agent in shell: it asks the model which word to look up, greps the facts, and asks for the answer.
ask() { # messages as JSON
    curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Content-Type: application/json" -d "{\"messages\": [$1]}" |
        sed -n 's/.*"content": *"\([a-z ]*\)".*/\1/p'
}
said() { printf '{"role": "%s", "content": "%s"}' "$1" "$2"; }

talk=$(said user "$TASK_QUESTION Which word shall I look up?")
searches=0
found=
while [ -z "$found" ] && [ $searches -lt 3 ]; do
    word=$(ask "$talk")
    searches=$((searches + 1))
    found=$(grep -o "\"$word\": \"[a-z]*\"" "$TASK_FILE" | grep -v '"thing"' | sed 's/"\(.*\)": "\(.*\)"/the \1 is \2./')
    talk="$talk, $(said assistant "$word"), $(said user "${found:-nothing found.}")"
done
answer=$(ask "$talk")
right=0
grep -q "\"golden_answers\": \[\"$answer\"\]" "$TASK_FILE" && right=1
reward=$(awk "BEGIN {print $right * (1.2 - 0.2 * $searches)}")
echo "{\"reward\": $reward, \"answer\": \"$answer\", \"metrics\": {\"em\": $right, \"looked_up\": $searches}}"
