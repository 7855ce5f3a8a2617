package dev

import (
	"context"
	"errors"
	"sync"

	"kubevpn/pkg/host/sandbox"
)

// begin starts the program, with its own name resolution if it has one. If it has its own network, begin waits for that
// first. Call leave when the program has ended: it ends the network and returns its error.
//
//	box.Start ─▶ Config.Network begins ─▶ ready ─▶ Process.Run ─▶ the program
//	                   │ ends by itself                              ▲
//	                   └────────────────── kill ─────────────────────┘
func (p *Program) begin(ctx context.Context) (process *sandbox.Process, leave func() error, err error) {
	ctx, kill := context.WithCancelCause(ctx)
	if process, err = p.box.Start(ctx); err != nil {
		kill(err)
		return nil, nil, err
	}
	if p.cfg.Network == nil {
		if p.names != nil {
			if err = process.SetNetwork(ctx, <-p.names); err == nil {
				err = process.Run(ctx)
			}
		}
		if err != nil {
			kill(err)
			_, _ = process.Wait() // the program never ran
		}
		return process, func() error { kill(nil); return nil }, err
	}
	var place sandbox.Place = process
	if p.cfg.Pod != nil {
		place = podPlace{process, p.cfg.Pod}
	}
	held, letGo := context.WithCancel(ctx)
	ready, ended := make(chan struct{}), make(chan struct{})
	var left error
	go func() {
		defer close(ended)
		left = p.cfg.Network(held, place, sync.OnceFunc(func() { close(ready) }))
		if held.Err() != nil {
			return
		}
		if left == nil {
			left = errors.New("the program's network has ended")
		}
		kill(left)
	}()
	leave = func() error {
		letGo()
		<-ended
		kill(nil)
		return left
	}
	select {
	case <-ready:
		err = process.Run(ctx)
	case <-ended:
		err = context.Cause(ctx)
	}
	if err == nil {
		return process, leave, nil
	}
	kill(err)
	_, _ = process.Wait() // the program never ran
	if e := leave(); !errors.Is(err, e) {
		err = errors.Join(err, e)
	}
	return nil, nil, err
}
