package connection

import "errors"

// pair is not supported: flows go to the traffic manager.
func pair() (a, b *end, err error) { return nil, nil, errors.ErrUnsupported }
