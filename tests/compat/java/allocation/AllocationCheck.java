import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * How RocketMQ's members divide queues. A line of input has, with tabs between, the strategy, the member that asks,
 * all members with commas between, and all queues as topic/broker/number with commas between. A line of output has the
 * member's queues in the same form. Strategies with a setting have it behind a colon: config:queues,
 * machine_room:rooms, nearby:strategy.
 */
public class AllocationCheck {
    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] parts = line.split("\t", -1);
            List<String> members = new ArrayList<>(Arrays.asList(parts[2].split(",")));
            List<MessageQueue> queues = new ArrayList<>();
            queues.addAll(queues(parts[3]));
            // As RebalanceImpl does before it asks the strategy.
            Collections.sort(members);
            Collections.sort(queues);
            System.out.println(strategy(parts[0]).allocate("group", parts[1], queues, members).stream()
                .map(queue -> queue.getTopic() + "/" + queue.getBrokerName() + "/" + queue.getQueueId())
                .collect(Collectors.joining(",")));
        }
    }

    private static List<MessageQueue> queues(String line) {
        List<MessageQueue> queues = new ArrayList<>();
        for (String text : line.split(",")) {
            if (!text.isEmpty()) {
                String[] queue = text.split("/");
                queues.add(new MessageQueue(queue[0], queue[1], Integer.parseInt(queue[2])));
            }
        }
        return queues;
    }

    private static AllocateMessageQueueStrategy strategy(String text) {
        String[] parts = text.split(":", 2);
        switch (parts[0]) {
            case "average":
                return new AllocateMessageQueueAveragely();
            case "circle":
                return new AllocateMessageQueueAveragelyByCircle();
            case "config":
                AllocateMessageQueueByConfig byConfig = new AllocateMessageQueueByConfig();
                byConfig.setMessageQueueList(queues(parts[1]));
                return byConfig;
            case "machine_room":
                AllocateMessageQueueByMachineRoom byRoom = new AllocateMessageQueueByMachineRoom();
                byRoom.setConsumeridcs(new HashSet<>(Arrays.asList(parts[1].split(","))));
                return byRoom;
            case "nearby":
                return new AllocateMachineRoomNearby(strategy(parts[1]), new RoomInName());
            default:
                return new AllocateMessageQueueConsistentHash();
        }
    }

    private static class RoomInName implements AllocateMachineRoomNearby.MachineRoomResolver {
        @Override
        public String brokerDeployIn(MessageQueue queue) {
            return queue.getBrokerName().split("@")[0];
        }

        @Override
        public String consumerDeployIn(String clientId) {
            return clientId.split("@")[0];
        }
    }
}
