// Package term writes for the person or the program that started a command. It knows the values of internal/api, and no
// command:
//
//	streams.go   Streams: input and outputs, notes, questions; Cleaner removes control characters from all output
//	format.go    Format: -o text, table, wide, json, yaml, name, jsonpath
//	progress.go  Progress: steps as lines, as a moving line, or as lines of JSON
//	screen.go    Screen: texts that replace each other, of commands that follow
//	table.go     tables, details below them, cells
//	texts.go     short texts for values that several commands print, and for errors
package term
