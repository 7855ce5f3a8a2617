package api

import "time"

// Project is what `kubevpn up` keeps running.
type Project struct {
	Name    string         `json:"name"`
	File    string         `json:"file"` // absolute
	Log     string         `json:"log"`  // the file with its output
	Entries []ProjectEntry `json:"entries"`
}

// ProjectEntry is one entry of a project.
//
//	waiting ──▶ starting ──▶ running ──▶ healthy ◀──▶ unhealthy
//	   └────────────┴───────────┴──▶ completed (exit code 0), failed, stopping
type ProjectEntry struct {
	Kind   string       `json:"kind"` // the command: proxy
	Name   string       `json:"name"`
	State  ProjectState `json:"state"`
	Detail string       `json:"detail,omitempty"` // why, or what it waits for
	Code   ExitCode     `json:"code,omitempty"`   // of a failure
	Since  time.Time    `json:"since"`
}

// ProjectState is the state of an entry.
type ProjectState string

const (
	ProjectWaiting   ProjectState = "waiting" // for other entries
	ProjectStarting  ProjectState = "starting"
	ProjectRunning   ProjectState = "running"
	ProjectHealthy   ProjectState = "healthy"
	ProjectUnhealthy ProjectState = "unhealthy"
	ProjectCompleted ProjectState = "completed"
	ProjectFailed    ProjectState = "failed"
	ProjectStopping  ProjectState = "stopping"
)
