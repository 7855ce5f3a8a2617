package workload

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"

	"kubevpn/internal/api"
)

// bodyLimit is the value of --body.
type bodyLimit int

func (b *bodyLimit) String() string { return fmt.Sprint(int(*b)) }
func (b *bodyLimit) Type() string   { return "size" }

func (b *bodyLimit) Set(s string) error {
	q, err := resource.ParseQuantity(s)
	if err != nil || q.Sign() < 0 || q.Value() > api.MaxRecordedBody {
		return fmt.Errorf("must be a number of bytes up to %dKi", api.MaxRecordedBody>>10)
	}
	*b = bodyLimit(q.Value())
	return nil
}
