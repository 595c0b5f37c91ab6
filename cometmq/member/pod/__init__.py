"""What Kubernetes shows of a member: events about its pod, and its role as a label of the pod."""
