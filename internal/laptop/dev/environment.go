package dev

import (
	"context"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
)

// Environment returns the variables of t's container, sorted by name. It calls warn for those that it cannot read. With
// local, it leaves out those that a program of this machine does not take from the container, such as PATH, and calls
// warn with their names.
func Environment(ctx context.Context, t Target, local bool, warn func(string)) ([]podenv.Variable, error) {
	r := &Runner{Options: Options{Show: func(e api.Event) { warn(e.Warning) }}, target: t}
	m, err := r.model(ctx)
	if err != nil {
		return nil, err
	}
	reader, err := m.Reader(m.container)
	if err != nil {
		return nil, err
	}
	if err := reader.See(ctx, m.Exec); err != nil {
		warn("the variables of the image are missing: " + err.Error())
	}
	variables, problems := reader.Environment(ctx)
	for _, problem := range problems {
		warn(problem.Error())
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if !local {
		return variables, nil
	}
	variables, left := forMachine(variables)
	if len(left) > 0 {
		warn("omitting variables that decide what programs of this machine execute: " + strings.Join(left, ", ") +
			"; -o json and -o docker contain them")
	}
	return variables, nil
}

// forMachine returns the variables that a program of this machine takes from a container, and the names of the others.
func forMachine(variables []podenv.Variable) (taken []podenv.Variable, left []string) {
	for _, v := range variables {
		if isKept(v.Name) || keptFromImage(v) {
			left = append(left, v.Name)
			continue
		}
		taken = append(taken, v)
	}
	return taken, left
}
