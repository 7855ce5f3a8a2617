package api

import (
	"fmt"
	"log/slog"
	"time"
)

// BeginStep reports and logs that a step begins. The returned function reports and logs its end, with a detail.
func BeginStep(progress func(Event), log *slog.Logger, format string,
	args ...any) (done func(format string, args ...any)) {
	name := fmt.Sprintf(format, args...)
	log.Info(name)
	progress(Event{Time: time.Now(), Step: name})
	return func(format string, args ...any) {
		detail := fmt.Sprintf(format, args...)
		log.Info(name, "result", detail)
		progress(Event{Time: time.Now(), Step: name, Detail: detail, Done: true})
	}
}
