import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * How RocketMQ's members divide queues. A line of input has, with tabs between, the strategy, the member that asks,
 * all members with commas between, and all queues as topic/broker/number with commas between. A line of output has the
 * member's queues in the same form.
 */
public class AllocationCheck {
    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] parts = line.split("\t", -1);
            List<String> members = new ArrayList<>(Arrays.asList(parts[2].split(",")));
            List<MessageQueue> queues = new ArrayList<>();
            for (String text : parts[3].split(",")) {
                String[] queue = text.split("/");
                queues.add(new MessageQueue(queue[0], queue[1], Integer.parseInt(queue[2])));
            }
            // As RebalanceImpl does before it asks the strategy.
            Collections.sort(members);
            Collections.sort(queues);
            System.out.println(strategy(parts[0]).allocate("group", parts[1], queues, members).stream()
                .map(queue -> queue.getTopic() + "/" + queue.getBrokerName() + "/" + queue.getQueueId())
                .collect(Collectors.joining(",")));
        }
    }

    private static AllocateMessageQueueStrategy strategy(String name) {
        switch (name) {
            case "average":
                return new AllocateMessageQueueAveragely();
            case "circle":
                return new AllocateMessageQueueAveragelyByCircle();
            default:
                return new AllocateMessageQueueConsistentHash();
        }
    }
}
